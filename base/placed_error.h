#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <typeinfo>

#include <tessera/base/error_text.h>

namespace tessera::internal {

/// What was thrown, and a text that has its words and the place.
struct PlacedError {
  std::exception_ptr thrown;
  std::string text;
};

/// Sets `thrown` to another exception of the type of `error`, where that is exactly one of `Types`.
template <typename... Types>
void make_error_anew(const std::exception& error, const std::string& text, std::exception_ptr& thrown) {
  const auto& type = typeid(error);
  ((type == typeid(Types) ? void(thrown = std::make_exception_ptr(Types(text))) : void()), ...);
}

/// The exception that is being handled, with `place` added to its words and its type kept. A c10::Error gets a context, and what
/// is of a type of <stdexcept> is made anew. Words of other types cannot be changed: they come as they were thrown, and `text`
/// alone has the place.
inline PlacedError placed_error(const std::string& place) {
  try {
    throw;
  } catch (c10::Error& error) {
    error.add_context(place);
    return {std::current_exception(), error_text(error)};
  } catch (const std::exception& error) {
    PlacedError placed{std::current_exception(), error_text(error) + " (" + place + ")"};
    make_error_anew<std::runtime_error, std::range_error, std::overflow_error, std::underflow_error, std::logic_error,
                    std::domain_error, std::invalid_argument, std::length_error, std::out_of_range>(error, placed.text,
                                                                                                    placed.thrown);
    return placed;
  } catch (...) {
    return {std::current_exception(), error_text(std::current_exception()) + " (" + place + ")"};
  }
}

} // namespace tessera::internal
