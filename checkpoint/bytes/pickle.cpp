#include <c10/util/Exception.h>
#include <tessera/checkpoint/bytes/pickle.h>

#include <bit>
#include <cstring>
#include <unordered_map>

namespace tessera::internal {

// Values may share an object, and each looks through its fields.
constexpr size_t kMostFields = 64;

// The opcodes of protocols 2 to 5, apart from those of text protocols, out-of-band buffers and extension registries.
class Unpickler {
 public:
  Unpickler(Pickle& pickle, std::string_view text, const std::string& source)
      : values_(pickle.values_), text_(text), source_(source) {}

  PickleRef run() {
    while (true) {
      const auto opcode = take(1)[0];
      if (opcode == '.') {
        if (stack_.size() != 1 || !marks_.empty()) fail("does not end with one value");
        return stack_.back();
      }
      if (!constant(opcode) && !text_or_bytes(opcode) && !container(opcode) && !memo(opcode) && !object(opcode)) {
        fail("has the unknown opcode " + std::to_string(static_cast<unsigned char>(opcode)));
      }
    }
  }

 private:
  [[noreturn]] void fail(const std::string& problem) const {
    TORCH_CHECK(false, source_, ": pickle ", problem, " (byte ", position_, " of ", text_.size(), ")");
  }

  std::string_view take(uint64_t bytes) {
    if (bytes > text_.size() - position_) fail("ends too early");
    const auto part = text_.substr(position_, bytes);
    position_ += bytes;
    return part;
  }
  std::string_view take_line() {
    const auto end = text_.find('\n', position_);
    if (end == std::string_view::npos) fail("ends too early");
    const auto line = take(end - position_);
    ++position_;
    return line;
  }
  uint64_t take_unsigned(size_t bytes) {
    uint64_t value = 0;
    std::memcpy(&value, take(bytes).data(), bytes);
    return value;
  }
  // Two's complement of up to 8 bytes.
  int64_t take_signed(uint64_t bytes) {
    if (bytes == 0) return 0;
    const auto shift = 64 - 8 * bytes;
    return static_cast<int64_t>(take_unsigned(bytes) << shift) >> shift;
  }

  PickleValue* make(PickleValue value) { return &values_.emplace_back(std::move(value)); }
  bool push(PickleValue value) { return push_ref(make(std::move(value))); }
  bool push_ref(PickleValue* value) {
    stack_.push_back(value);
    return true;
  }
  PickleValue* pop() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) fail("takes a value that is not there");
    auto* value = stack_.back();
    stack_.pop_back();
    return value;
  }
  std::vector<PickleRef> pop_to_mark() {
    if (marks_.empty()) fail("takes a mark that is not there");
    std::vector<PickleRef> items(stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  template <typename T>
  T& top() {
    auto* found = stack_.empty() ? nullptr : std::get_if<T>(stack_.back());
    if (!found) fail("applies an opcode to a value of the wrong kind");
    return *found;
  }

  bool constant(char opcode) {
    switch (opcode) {
      case '\x80':
        if (take_unsigned(1) > 5) fail("has an unknown protocol");
        return true;
      case '\x95': take(8); return true; // a frame's length
      case 'N': return push(PickleNone{});
      case '\x88': return push(true);
      case '\x89': return push(false);
      case 'K': return push(static_cast<int64_t>(take_unsigned(1)));
      case 'M': return push(static_cast<int64_t>(take_unsigned(2)));
      case 'J': return push(take_signed(4));
      case '\x8a': return integer(take_unsigned(1));
      case '\x8b': return integer(take_unsigned(4));
      case 'G': return push(std::bit_cast<double>(__builtin_bswap64(take_unsigned(8))));
      default: return false;
    }
  }

  bool integer(uint64_t bytes) { return bytes > 8 ? push(PickleBytes{std::string(take(bytes))}) : push(take_signed(bytes)); }

  bool text_or_bytes(char opcode) {
    switch (opcode) {
      case '\x8c': return push(std::string(take(take_unsigned(1))));
      case 'X': return push(std::string(take(take_unsigned(4))));
      case '\x8d': return push(std::string(take(take_unsigned(8))));
      case 'C': return push(PickleBytes{std::string(take(take_unsigned(1)))});
      case 'B': return push(PickleBytes{std::string(take(take_unsigned(4)))});
      case '\x8e':
      case '\x96': return push(PickleBytes{std::string(take(take_unsigned(8)))});
      default: return false;
    }
  }

  bool container(char opcode) {
    switch (opcode) {
      case '(': marks_.push_back(stack_.size()); return true;
      case ')': return push(PickleTuple{});
      case '\x85':
      case '\x86':
      case '\x87': return push(PickleTuple{pop_items(static_cast<size_t>(opcode - '\x84'))});
      case 't': return push(PickleTuple{pop_to_mark()});
      case ']':
      case '\x8f': return push(PickleList{});
      case 'l':
      case '\x91': return push(PickleList{pop_to_mark()});
      case '}': return push(PickleDict{});
      case 'a': return append({pop()});
      case 'e':
      case '\x90': return append(pop_to_mark());
      case 's': return set_items(pop_items(2));
      case 'u': return set_items(pop_to_mark());
      default: return false;
    }
  }

  std::vector<PickleRef> pop_items(size_t count) {
    std::vector<PickleRef> items(count);
    for (size_t i = count; i-- > 0;) items[i] = pop();
    return items;
  }
  // Those of a deque or a defaultdict, which is no list or dict here, are dropped.
  bool drops_items() const { return !stack_.empty() && std::get_if<PickleObject>(stack_.back()); }
  bool append(const std::vector<PickleRef>& items) {
    if (drops_items()) return true;
    auto& list = top<PickleList>().items;
    list.insert(list.end(), items.begin(), items.end());
    return true;
  }
  bool set_items(const std::vector<PickleRef>& items) {
    if (items.size() % 2 != 0) fail("has a key without a value");
    if (drops_items()) return true;
    auto& dict = top<PickleDict>().items;
    for (size_t i = 0; i < items.size(); i += 2) dict.emplace_back(items[i], items[i + 1]);
    return true;
  }

  bool memo(char opcode) {
    switch (opcode) {
      case '\x94': return store(memo_.size());
      case 'q': return store(take_unsigned(1));
      case 'r': return store(take_unsigned(4));
      case 'h': return recall(take_unsigned(1));
      case 'j': return recall(take_unsigned(4));
      case '0': pop(); return true;
      case '1': pop_to_mark(); return true;
      case '2': {
        auto* value = pop();
        push_ref(value);
        return push_ref(value);
      }
      default: return false;
    }
  }
  bool store(uint64_t index) {
    if (stack_.empty()) fail("takes a value that is not there");
    memo_[index] = stack_.back();
    return true;
  }
  bool recall(uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) fail("recalls a value that it did not store");
    return push_ref(found->second);
  }

  bool name_class(const std::vector<PickleRef>& items) {
    const auto* module = std::get_if<std::string>(items[0]);
    const auto* name = std::get_if<std::string>(items[1]);
    if (!module || !name) fail("names a class by something else than text");
    return push(PickleName{*module + "." + *name});
  }
  static bool is_new_ordered_dict(const std::vector<PickleRef>& call) {
    const auto* name = std::get_if<PickleName>(call[0]);
    const auto* arguments = std::get_if<PickleTuple>(call[1]);
    return name && name->name == "collections.OrderedDict" && arguments && arguments->items.empty();
  }
  bool object(char opcode) {
    switch (opcode) {
      case 'c': {
        const std::string module(take_line());
        return push(PickleName{module + "." + std::string(take_line())});
      }
      case '\x93': return name_class(pop_items(2));
      case 'R':
      case '\x81': {
        const auto items = pop_items(2);
        if (is_new_ordered_dict(items)) return push(PickleDict{});
        return push(PickleObject{items[0], items[1], nullptr});
      }
      case '\x92': { // with keyword arguments, which no class that is understood has
        const auto items = pop_items(3);
        return push(PickleObject{items[0], items[1], items[2]});
      }
      case 'b': {
        const auto* state = pop();
        if (!stack_.empty() && std::get_if<PickleDict>(stack_.back())) return true;
        top<PickleObject>().state = state;
        return true;
      }
      case 'Q': return push(PicklePersistent{pop()});
      default: return false;
    }
  }

  std::deque<PickleValue>& values_;
  std::string_view text_;
  const std::string& source_;
  size_t position_ = 0;
  std::vector<PickleValue*> stack_;
  std::vector<size_t> marks_; // sizes of the stack
  std::unordered_map<uint64_t, PickleValue*> memo_;
};

Pickle::Pickle(std::string_view text, const std::string& source) { root_ = Unpickler(*this, text, source).run(); }

PickleRef pickle_find(const PickleDict& dict, const std::string& key) {
  for (const auto& [name, value] : dict.items) {
    const auto* text = std::get_if<std::string>(name);
    if (text && *text == key) return value;
  }
  return nullptr;
}

const std::vector<PickleRef>& pickle_items(PickleRef value, const std::string& what) {
  if (const auto* list = std::get_if<PickleList>(value)) return list->items;
  const auto* object = std::get_if<PickleObject>(value);
  if (!object) return pickle_as<PickleTuple>(value, what).items;
  TORCH_CHECK(pickle_as<PickleName>(object->callable, what).name == "torch.Size", what, " is no list, tuple or torch.Size");
  const auto& arguments = pickle_as<PickleTuple>(object->arguments, what).items;
  TORCH_CHECK(arguments.size() == 1, what, " is a torch.Size without its numbers");
  return pickle_as<PickleTuple>(arguments[0], what).items;
}

std::vector<int64_t> pickle_sizes(PickleRef value, const std::string& what) {
  constexpr size_t kMostDims = 64;
  const auto& items = pickle_items(value, what);
  TORCH_CHECK(items.size() <= kMostDims, what, " has ", items.size(), " dims");
  std::vector<int64_t> numbers;
  for (const auto* item : items) {
    numbers.push_back(pickle_as<int64_t>(item, what));
    TORCH_CHECK(numbers.back() >= 0, what, " has a negative number");
  }
  return numbers;
}

PickleRef pickle_field(PickleRef object, const std::string& name, const std::string& what) {
  const auto& fields = pickle_as<PickleDict>(pickle_as<PickleObject>(object, what).state, what);
  TORCH_CHECK(fields.items.size() <= kMostFields, what, " is an object with ", fields.items.size(), " fields");
  return pickle_find(fields, name);
}

std::string pickle_class(PickleRef value) {
  const auto* object = std::get_if<PickleObject>(value);
  const auto* name = object ? std::get_if<PickleName>(object->callable) : nullptr;
  return name ? name->name : "";
}

} // namespace tessera::internal
