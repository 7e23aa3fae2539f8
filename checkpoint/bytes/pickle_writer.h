#pragma once

// Internal: writes Python pickles of protocol 2, with the opcodes that PyTorch's own readers know.

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

#include <tessera/optim/state_value.h>

namespace tessera::internal {

/// Builds a pickle in the order of its values: a function's name, then its arguments, then the call.
class PickleWriter {
 public:
  PickleWriter() : text_("\x80\x02") {}

  void boolean(bool value) { text_ += value ? '\x88' : '\x89'; }
  void none() { text_ += 'N'; }
  void integer(int64_t value);
  void number(double value);
  void text(const std::string& value);
  /// A class or function.
  void name(const std::string& module, const std::string& name);
  void integers(c10::IntArrayRef values); ///< a tuple

  /// The values between `open` and one of the others become a tuple, the items of the list before, or of the dict before.
  void open() { text_ += '('; }
  void close_tuple() { text_ += 't'; }
  void close_list() { text_ += 'e'; }
  void close_dict() { text_ += 'u'; }
  void empty_tuple() { text_ += ')'; }
  void empty_list() { text_ += ']'; }
  void empty_dict() { text_ += '}'; }

  /// Calls the function before the tuple with it.
  void call() { text_ += 'R'; }
  /// An object of the class, to which `build` gives the dict that follows.
  void object(const std::string& module, const std::string& class_name);
  void build() { text_ += 'b'; }
  /// What is stored under the tuple before.
  void persistent() { text_ += 'Q'; }

  /// Ends the pickle.
  std::string take() &&;

 private:
  template <typename T>
  void raw(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
  // True when the value was written before, and is recalled; otherwise what comes next is stored.
  bool recall(const std::string& key);
  void store();

  std::string text_;
  std::unordered_map<std::string, uint32_t> known_;
};

/// True where Python has a class such as torch.FloatStorage for the dtype.
bool has_storage_class(at::ScalarType dtype);

/// `torch._utils._rebuild_tensor_v2` of a contiguous tensor that fills the storage `key`. `for_python` as torch.save writes it
/// without a zip archive; otherwise as LibTorch's archives have it.
void write_tensor(PickleWriter& out, at::ScalarType dtype, c10::IntArrayRef sizes, const std::string& key, bool for_python);

/// A value as Python has it.
void write_value(PickleWriter& out, const StateValue& value);
/// Writes it for LibTorch, whose lists have types.
void write_typed_value(PickleWriter& out, const StateValue& value);

/// A storage of bytes, for Python.
void write_byte_storage(PickleWriter& out, const std::string& key, int64_t bytes);

} // namespace tessera::internal
