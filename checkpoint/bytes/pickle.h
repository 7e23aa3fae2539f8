#pragma once

// Internal: reads Python pickles as data. It calls nothing, imports nothing and makes no objects: a class or function is a name,
// a call is that name with its arguments. A new OrderedDict is a dict, without the attributes that it may have. What is put into
// an object of another class, such as a deque, is not kept.

#include <c10/util/Exception.h>

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tessera::internal {

struct PickleValue;
using PickleRef = const PickleValue*;

struct PickleNone {};
/// "torch.float32": a class, function or constant.
struct PickleName {
  std::string name;
};
/// Bytes, or an integer beyond 64 bits.
struct PickleBytes {
  std::string bytes;
};
/// A list or a set.
struct PickleList {
  std::vector<PickleRef> items;
};
struct PickleTuple {
  std::vector<PickleRef> items;
};
struct PickleDict {
  std::vector<std::pair<PickleRef, PickleRef>> items;
};
/// What calling `callable` with `arguments` would give, and the state that would be set on it (null: none).
struct PickleObject {
  PickleRef callable = nullptr;
  PickleRef arguments = nullptr;
  PickleRef state = nullptr;
};
/// An object that is stored elsewhere, under this id.
struct PicklePersistent {
  PickleRef id = nullptr;
};

struct PickleValue : std::variant<PickleNone, bool, int64_t, double, std::string, PickleBytes, PickleName, PickleList,
                                  PickleTuple, PickleDict, PickleObject, PicklePersistent> {
  using variant::variant;
};

/// A pickle's values; they may refer to each other in circles.
class Pickle {
 public:
  /// Errors, which begin with `source`: an opcode that is unknown or damaged. Uses memory in proportion to the text.
  Pickle(std::string_view text, const std::string& source);
  Pickle(Pickle&&) = default;
  Pickle& operator=(Pickle&&) = default;

  PickleRef root() const { return root_; }

 private:
  friend class Unpickler;
  std::deque<PickleValue> values_; // does not move its elements
  PickleRef root_ = nullptr;
};

/// The value as one alternative; an error that begins with `what` when it is another.
template <typename T>
const T& pickle_as(PickleRef value, const std::string& what) {
  const auto* found = std::get_if<T>(value);
  TORCH_CHECK(found, what, " is missing or of another kind than expected");
  return *found;
}

/// The entry of a dict with this string key; null when there is none.
PickleRef pickle_find(const PickleDict& dict, const std::string& key);

/// The items of a list, tuple or torch.Size.
const std::vector<PickleRef>& pickle_items(PickleRef value, const std::string& what);

/// Sizes, strides or offsets: at most 64 integers, none of them negative.
std::vector<int64_t> pickle_sizes(PickleRef value, const std::string& what);

/// The field of an object whose state is a dict; null when there is none.
PickleRef pickle_field(PickleRef object, const std::string& name, const std::string& what);

/// The class of an object that was made by copyreg (NEWOBJ), "" for any other value.
std::string pickle_class(PickleRef value);

} // namespace tessera::internal
