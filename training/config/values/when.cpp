#include <tessera/training/config/values/when.h>

#include <absl/strings/ascii.h>
#include <absl/strings/numbers.h>
#include <c10/util/Exception.h>

#include <array>
#include <chrono>
#include <cmath>
#include <optional>
#include <utility>

#include <tessera/training/config/keys/config_key.h>

namespace tessera::internal {

namespace {

struct Unit {
  const char* name;
  enum class Kind { kSteps, kEpochs, kTime } kind;
  double milliseconds = 0;
};

constexpr double kSecond = 1000, kMinute = 60 * kSecond, kHour = 60 * kMinute, kDay = 24 * kHour;

constexpr auto kUnits = std::to_array<Unit>({{"steps", Unit::Kind::kSteps},
                                             {"step", Unit::Kind::kSteps},
                                             {"epochs", Unit::Kind::kEpochs},
                                             {"epoch", Unit::Kind::kEpochs},
                                             {"s", Unit::Kind::kTime, kSecond},
                                             {"seconds", Unit::Kind::kTime, kSecond},
                                             {"min", Unit::Kind::kTime, kMinute},
                                             {"minutes", Unit::Kind::kTime, kMinute},
                                             {"minute", Unit::Kind::kTime, kMinute},
                                             {"h", Unit::Kind::kTime, kHour},
                                             {"hours", Unit::Kind::kTime, kHour},
                                             {"hour", Unit::Kind::kTime, kHour},
                                             {"days", Unit::Kind::kTime, kDay},
                                             {"day", Unit::Kind::kTime, kDay}});

struct Amount {
  Unit unit;
  double number = 0;
};

Amount amount_of(const std::string& text, const std::string& key) {
  constexpr double kMost = 1e15;
  const auto digits = text.find_first_not_of("0123456789.eE+");
  const auto name = digits == std::string::npos ? "" : std::string(absl::StripAsciiWhitespace(text.substr(digits)));
  double number = 0;
  const bool is_number = absl::SimpleAtod(text.substr(0, digits), &number) && number > 0 && number <= kMost;
  TORCH_CHECK_VALUE(is_number && !name.empty(), key, " is \"", text,
                    "\", but must be a positive number and a unit: \"500 steps\", \"3 epochs\", \"30 min\"");
  std::vector<std::string> names;
  for (const auto& unit : kUnits) {
    names.emplace_back(unit.name);
    if (name != unit.name) continue;
    TORCH_CHECK_VALUE(unit.kind == Unit::Kind::kTime || number == std::floor(number), key, " is \"", text,
                      "\", which is no whole number");
    return {unit, number};
  }
  TORCH_CHECK_VALUE(false, key, " is \"", text, "\", whose unit is unknown", nearest_name(name, names),
                    " There are steps, epochs, s, min, h and days");
}

struct Amounts {
  std::optional<int64_t> steps, epochs, milliseconds;
};

Amounts amounts_of(const std::vector<std::string>& texts, const std::string& key) {
  Amounts amounts;
  for (const auto& text : texts) {
    const auto [unit, number] = amount_of(text, key);
    const bool is_time = unit.kind == Unit::Kind::kTime;
    auto& place = is_time ? amounts.milliseconds : unit.kind == Unit::Kind::kSteps ? amounts.steps : amounts.epochs;
    TORCH_CHECK_VALUE(!place, key, " has \"", text, "\" beside another one of that kind");
    place = std::max<int64_t>(1, std::llround(is_time ? number * unit.milliseconds : number));
  }
  return amounts;
}

} // namespace

Every every_of(const std::vector<std::string>& texts, const std::string& key) {
  const auto amounts = amounts_of(texts, key);
  TORCH_CHECK_VALUE(!amounts.epochs, key, " counts epochs, but takes steps and times");
  return {.steps = amounts.steps.value_or(0), .time = std::chrono::milliseconds(amounts.milliseconds.value_or(0))};
}

StopAfter stop_after_of(const std::vector<std::string>& texts, const std::string& key) {
  const auto amounts = amounts_of(texts, key);
  return {.steps = amounts.steps.value_or(0),
          .epochs = amounts.epochs.value_or(0),
          .run_time = std::chrono::milliseconds(amounts.milliseconds.value_or(0))};
}

} // namespace tessera::internal
