#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace examples {

/// Reads the flags of the command line; `-` and `_` in a flag's name are the same. `--help` prints `usage` and the flags of the
/// job, and those defined in `source` (as "gpt/options.cpp"). A flag that does not exist ends the program (Abseil does that); an
/// argument that belongs to no flag is an error.
void parse_command_line(int argc, char** argv, const std::string& usage, const std::string& source);

/// The spellings of a flag's values.
template <typename T>
using Choices = std::vector<std::pair<const char*, T>>;

/// The value that `text` spells; an error that names the flag and the choices when there is none.
template <typename T>
T choose(const char* flag, const std::string& text, const Choices<T>& choices) {
  std::string known;
  for (const auto& choice : choices) known += (known.empty() ? "" : ", ") + std::string(choice.first);
  const auto found = std::find_if(choices.begin(), choices.end(), [&](const auto& choice) { return text == choice.first; });
  TORCH_CHECK(found != choices.end(), "--", flag, " is '", text, "', but must be one of: ", known);
  return found->second;
}

template <typename T>
const char* name_of(T value, const Choices<T>& choices) {
  return std::find_if(choices.begin(), choices.end(), [&](const auto& choice) { return choice.second == value; })->first;
}

/// No flag needs a larger number, and products of two such numbers fit.
inline constexpr int64_t kLargest = 1'000'000'000;

/// An error that names the flag when `value` is less than `smallest`, more than `kLargest`, or no number.
template <typename T>
void check_at_least(const char* flag, T value, T smallest) {
  TORCH_CHECK(value >= smallest, "--", flag, " is ", value, ", but must be at least ", smallest);
  TORCH_CHECK(value <= static_cast<T>(kLargest), "--", flag, " is ", value, ", but must be at most ", kLargest);
}

} // namespace examples
