#pragma once

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <exception>
#include <string>
#include <typeinfo>

namespace tessera::internal {

/// The message of `error`, without the C++ stack that c10::Error adds to it. Never empty: where texts are collected, an empty one
/// says that nothing failed.
inline std::string error_text(const std::exception& error) {
  const auto* with_stack = dynamic_cast<const c10::Error*>(&error);
  std::string text = with_stack != nullptr ? with_stack->what_without_backtrace() : error.what();
  return text.empty() ? c10::demangle(typeid(error).name()) + " without a text" : text;
}

/// The same of what was thrown, whatever it is.
inline std::string error_text(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return error_text(error);
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

} // namespace tessera::internal
