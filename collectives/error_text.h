#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace tessera::internal {

/// The message of `error`, without the C++ stack that c10::Error adds to it.
inline std::string error_text(const std::exception& error) {
  const auto* with_stack = dynamic_cast<const c10::Error*>(&error);
  return with_stack != nullptr ? with_stack->what_without_backtrace() : error.what();
}

} // namespace tessera::internal
