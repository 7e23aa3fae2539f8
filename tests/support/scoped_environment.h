#pragma once

#include <cstdlib>
#include <optional>
#include <string>

namespace tessera::testing {

/// A variable of this process's environment with another value while it lives.
class ScopedEnvironment {
 public:
  ScopedEnvironment(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value, /*overwrite=*/1);
  }
  ~ScopedEnvironment() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

 private:
  const char* const name_;
  std::optional<std::string> before_;
};

} // namespace tessera::testing
