// What the values "auto" of a file become.
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <tessera/base/listing.h>
#include <tessera/training/config/values/auto_arguments.h>
#include <tessera/training/config/values/config_values.h>
#include <tessera/training/config/values/when.h>

namespace tessera::internal {

namespace {

/// In a block that DeepSpeed reads by a type of its own, "auto" is the default.
bool auto_is_default(const ConfigKey& key) {
  for (const auto* block : {"zero_optimization.", "fp16.", "bf16.", "tensorboard.", "csv_monitor."}) {
    if (key.name.starts_with(block)) return true;
  }
  return false;
}

} // namespace

void ConfigValues::fill(const TrainArguments& arguments) {
  std::vector<std::string> differences, unfilled;
  for (auto item = values_.begin(); item != values_.end();) {
    auto& [name, value] = *item;
    const auto& key = *find_key(name);
    auto filling = filling_of(key.filler, arguments);
    if (is_auto(value) && !filling.value) fill_from_file(key.filler, filling);
    if (is_auto(value) && !fill_auto(key, filling, value, unfilled)) {
      item = values_.erase(item);
      continue;
    }
    if (filling.value && as_type(key, *filling.value, filling.argument) != value)
      differences.push_back(
          fmt::format("{} is {}, and {} is {}", name, to_text(value), filling.argument, to_text(*filling.value)));
    ++item;
  }
  TORCH_CHECK_VALUE(unfilled.empty(), source_, ": ", fmt::format("{}", fmt::join(unfilled, "\n  ")));
  TORCH_CHECK_VALUE(differences.empty(), source_, ": values differ from the program's arguments", listing(differences),
                    "\nWith \"auto\" in the file the arguments fill them");
}

void ConfigValues::fill_from_file(AutoFill filler, Filling& filling) const {
  if (filler != AutoFill::kTotalSteps) return;
  const auto steps = stop_after_of(texts("tessera.stop_after"), where("tessera.stop_after")).steps;
  if (steps > 0) filling = {"tessera.stop_after", steps};
}

bool ConfigValues::fill_auto(const ConfigKey& key, const Filling& filling, Json& value, std::vector<std::string>& unfilled) {
  const std::string name(key.name);
  if (filling.value || key.filler == AutoFill::kNothing) {
    value = as_type(key, filling.value.value_or(Json(0)), filling.argument);
    filled_[name] = filling.value ? filling.argument : "0";
    return true;
  }
  // The batch's arithmetic finds these two; the others have their defaults.
  const bool is_found = key.filler == AutoFill::kTrainBatch || key.filler == AutoFill::kAccumulation;
  const bool is_default = auto_is_default(key) && filling.argument.empty();
  if (!is_found && !is_default && key.filler != AutoFill::kHiddenSize) {
    unfilled.push_back(name + " is \"auto\", " +
                       (filling.argument.empty() ? "which nothing fills: give a value, or leave the key out"
                                                 : "and the argument " + filling.argument + ", which fills it, is not given"));
  }
  filled_[name] = is_found ? "the other numbers of the batch" : "the default";
  return false;
}

} // namespace tessera::internal
