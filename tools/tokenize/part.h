#pragma once

#include <tessera/checkpoint/bytes/json.h>

#include <initializer_list>
#include <string>
#include <vector>

namespace tokenize {

/// A part of a tokenizer.json: an object with a "type".
class Part {
 public:
  explicit Part(const tessera::internal::JsonView& json);

  const std::string& type() const { return type_; }
  const tessera::internal::JsonView& json() const { return json_; }

  /// An error that names the first key beside "type" that is not among these.
  void allow(std::initializer_list<const char*> keys) const;
  /// A key's value, or `otherwise` where it is missing or null.
  bool boolean(const std::string& key, bool otherwise) const;
  std::string string(const std::string& key, const std::string& otherwise) const;
  /// Whether a key has a value other than null.
  bool has(const std::string& key) const;
  /// An error that says what of it is not supported.
  [[noreturn]] void refuse(const std::string& what) const;

 private:
  tessera::internal::JsonView json_;
  std::string type_;
};

} // namespace tokenize
