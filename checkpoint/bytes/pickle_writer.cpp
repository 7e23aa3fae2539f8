#include <ATen/TensorUtils.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <tessera/checkpoint/bytes/pickle_writer.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <utility>
#include <variant>
#include <vector>

namespace tessera::internal {

namespace {

// Python has these as torch.FloatStorage and so on.
constexpr std::array kWithStorageClass{at::kByte,  at::kChar,   at::kShort,    at::kInt,  at::kLong,         at::kHalf,
                                       at::kFloat, at::kDouble, at::kBFloat16, at::kBool, at::kComplexFloat, at::kComplexDouble};

// torch.uint16 and so on, of which Python has no storage class.
constexpr std::array<std::pair<at::ScalarType, const char*>, 8> kNewDtypes{{
    {at::kUInt16, "uint16"},
    {at::kUInt32, "uint32"},
    {at::kUInt64, "uint64"},
    {at::kFloat8_e4m3fn, "float8_e4m3fn"},
    {at::kFloat8_e5m2, "float8_e5m2"},
    {at::kFloat8_e4m3fnuz, "float8_e4m3fnuz"},
    {at::kFloat8_e5m2fnuz, "float8_e5m2fnuz"},
    {at::kFloat8_e8m0fnu, "float8_e8m0fnu"},
}};

std::string storage_class(at::ScalarType dtype) { return std::string(c10::toString(dtype)) + "Storage"; }

void write_storage(PickleWriter& out, const std::string& class_name, const std::string& key, int64_t elements, bool for_python) {
  out.open();
  out.text("storage");
  out.name("torch", class_name);
  out.text(key);
  out.text("cpu");
  out.integer(elements);
  if (for_python) out.none(); // no view of another storage
  out.close_tuple();
  out.persistent();
}

void write_item(PickleWriter& out, bool value) { out.boolean(value); }
void write_item(PickleWriter& out, int64_t value) { out.integer(value); }
void write_item(PickleWriter& out, double value) { out.number(value); }
void write_item(PickleWriter& out, const std::string& value) { out.text(value); }
template <typename T>
void write_item(PickleWriter& out, const std::vector<T>& values) {
  out.empty_list();
  out.open();
  for (const auto& value : values) write_item(out, value);
  out.close_list();
}

} // namespace

void PickleWriter::integer(int64_t value) {
  if (value >= 0 && value <= std::numeric_limits<uint8_t>::max()) {
    text_ += 'K';
    raw(static_cast<uint8_t>(value));
  } else if (value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max()) {
    text_ += 'J';
    raw(static_cast<int32_t>(value));
  } else {
    text_ += "\x8a\x08";
    raw(value);
  }
}

void PickleWriter::number(double value) {
  text_ += 'G';
  raw(__builtin_bswap64(std::bit_cast<uint64_t>(value)));
}

bool PickleWriter::recall(const std::string& key) {
  const auto [found, is_new] = known_.emplace(key, static_cast<uint32_t>(known_.size()));
  if (is_new) return false;
  text_ += 'j';
  raw(found->second);
  return true;
}

void PickleWriter::store() {
  text_ += 'r';
  raw(static_cast<uint32_t>(known_.size() - 1));
}

void PickleWriter::text(const std::string& value) {
  if (recall("t" + value)) return;
  TORCH_CHECK(value.size() <= std::numeric_limits<uint32_t>::max(), "a pickle holds no text of ", value.size(), " bytes");
  text_ += 'X';
  raw(static_cast<uint32_t>(value.size()));
  text_ += value;
  store();
}

void PickleWriter::name(const std::string& module, const std::string& name) {
  const auto lines = module + "\n" + name + "\n";
  if (recall("c" + lines)) return;
  text_ += 'c' + lines;
  store();
}

void PickleWriter::integers(c10::IntArrayRef values) {
  open();
  for (const auto value : values) integer(value);
  close_tuple();
}

void PickleWriter::object(const std::string& module, const std::string& class_name) {
  name(module, class_name);
  empty_tuple();
  text_ += '\x81';
}

std::string PickleWriter::take() && {
  text_ += '.';
  return std::move(text_);
}

bool has_storage_class(at::ScalarType dtype) { return std::ranges::find(kWithStorageClass, dtype) != kWithStorageClass.end(); }

void write_tensor(PickleWriter& out, at::ScalarType dtype, c10::IntArrayRef sizes, const std::string& key, bool for_python) {
  const auto* renamed = std::ranges::find(kNewDtypes, dtype, &std::pair<at::ScalarType, const char*>::first);
  const bool has_class = has_storage_class(dtype);
  TORCH_CHECK(has_class || renamed != kNewDtypes.end(), "PyTorch's files hold no ", c10::toString(dtype));
  const bool as_bytes = for_python && !has_class;
  const auto elements = c10::multiply_integers(sizes);
  out.name("torch._utils", as_bytes ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
  out.open();
  const auto item = as_bytes ? static_cast<int64_t>(c10::elementSize(dtype)) : 1;
  write_storage(out, storage_class(as_bytes ? at::kByte : dtype), key, elements * item, for_python);
  out.integer(0); // the storage's first element
  out.integers(sizes);
  out.integers(at::detail::defaultStrides(sizes));
  out.boolean(false); // requires_grad
  out.name("collections", "OrderedDict");
  out.empty_tuple();
  out.call(); // hooks
  if (as_bytes) out.name("torch", renamed->second);
  out.close_tuple();
  out.call();
}

void write_value(PickleWriter& out, const StateValue& value) {
  std::visit([&](const auto& held) { write_item(out, held); }, value);
}

void write_typed_value(PickleWriter& out, const StateValue& value) {
  const auto apply = [&](const char* function, const char* type) {
    out.name("torch.jit._pickle", function);
    out.open();
    write_value(out, value);
    if (type) out.text(type);
    out.close_tuple();
    out.call();
  };
  if (std::holds_alternative<std::vector<int64_t>>(value)) return apply("build_intlist", nullptr);
  if (std::holds_alternative<std::vector<double>>(value)) return apply("build_doublelist", nullptr);
  if (std::holds_alternative<std::vector<std::string>>(value)) return apply("restore_type_tag", "List[str]");
  write_value(out, value);
}

void write_byte_storage(PickleWriter& out, const std::string& key, int64_t bytes) {
  write_storage(out, storage_class(at::kByte), key, bytes, true);
}

} // namespace tessera::internal
