// The state dict of a learning-rate schedule.
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <limits>
#include <memory>
#include <typeinfo>
#include <utility>

#include <tessera/base/listing.h>
#include <tessera/checkpoint/bytes/json.h>
#include <tessera/training/lr_schedule.h>

namespace tessera {

namespace {

using torch::optim::LRScheduler;

/// Names the counter that every class derived from LibTorch's has.
struct StepCount : LRScheduler {
  static unsigned& of(LRScheduler& schedule) { return schedule.*(&StepCount::step_count_); }
};

std::string to_text(const StateValue& value) {
  return std::visit([](const auto& each) { return fmt::format("{}", each); }, value);
}

class ScheduleBinding final : public StateBinding {
 public:
  ScheduleBinding(LRScheduler& schedule, ScheduleStateOptions options)
      : schedule_(schedule), ours_(dynamic_cast<LRSchedule*>(&schedule)), options_(std::move(options)) {
    TORCH_CHECK_VALUE(!options_.name.empty(), "state dict: the name of a learning-rate schedule is empty");
  }

  /// Type, settings, and base rates that count: what a checkpoint must hold alike.
  std::map<std::string, StateValue> fixed() const {
    std::map<std::string, StateValue> values;
    values[name_of("type")] = ours_ ? ours_->type() : c10::demangle(typeid(schedule_).name());
    if (!ours_) return values;
    if (ours_->rates() == LRSchedule::Rates::kOfBase) values[name_of("base_lrs")] = ours_->base_lrs();
    for (const auto& [name, value] : ours_->settings()) values[name_of("settings." + name)] = value;
    return values;
  }

  void add_entries(StateDict& state) const {
    add_steps(state);
    if (ours_) state.set(name_of("base_lrs"), ours_->base_lrs());
    for (const auto& [name, value] : fixed()) state.set(name, value);
  }

  void before_load(StateDict& state, const SavedState& saved) override {
    if (state.contains(name_of("steps_taken"))) add_steps(state); // they stay where a load may leave them out
    if (saved.values.count(name_of("type")) == 0) return;         // reported as missing
    check_steps(saved);
    if (!options_.allow_other_settings) return check_same(saved);
    const auto prefix = name_of(""), steps = name_of("steps_taken");
    // Another schedule's too, which an earlier load has set.
    state.erase_if([&](const auto& entry) { return entry.name.starts_with(prefix) && entry.name != steps; });
    for (auto item = saved.values.lower_bound(prefix); item != saved.values.end() && item->first.starts_with(prefix); ++item) {
      if (item->first != steps) state.set(item->first, item->second);
    }
  }

  std::string prefix() const override { return name_of(""); }

  /// Ranks with other learning rates would train apart.
  std::string settings() const override {
    std::vector<std::string> lines;
    for (const auto& [name, value] : fixed()) lines.push_back(fmt::format("{} {}", name, to_text(value)));
    return fmt::format("{}", fmt::join(lines, ", "));
  }

  void after_load(const StateDict& state) override {
    const auto steps = state.value<int64_t>(name_of("steps_taken"));
    if (ours_) return ours_->set_steps_taken(steps);
    StepCount::of(schedule_) = static_cast<unsigned>(steps);
  }

 private:
  void add_steps(StateDict& state) const { state.set(name_of("steps_taken"), static_cast<int64_t>(StepCount::of(schedule_))); }

  std::string name_of(const std::string& what) const { return options_.name + "." + what; }

  /// A value of another type is left to the load's own report.
  void check_steps(const SavedState& saved) const {
    const auto found = saved.values.find(name_of("steps_taken"));
    const auto* steps = found == saved.values.end() ? nullptr : std::get_if<int64_t>(&found->second);
    TORCH_CHECK(!steps || (*steps >= 0 && *steps <= std::numeric_limits<unsigned>::max()), name_of("steps_taken"), " is ", *steps,
                ", which no schedule has taken");
  }

  void check_same(const SavedState& saved) const {
    const auto here = fixed();
    std::vector<std::string> differing;
    for (const auto& [name, value] : here) {
      const auto found = saved.values.find(name);
      const bool is_saved = found != saved.values.end();
      if (is_saved && internal::is_same(found->second, value)) continue;
      differing.push_back(fmt::format("{}: saved {}, here {}", name, is_saved ? to_text(found->second) : "not", to_text(value)));
    }
    const auto prefix = name_of("settings.");
    for (auto item = saved.values.lower_bound(prefix); item != saved.values.end() && item->first.starts_with(prefix); ++item) {
      if (here.count(item->first) == 0)
        differing.push_back(fmt::format("{}: saved {}, not here", item->first, to_text(item->second)));
    }
    TORCH_CHECK(differing.empty(), "the learning-rate schedule \"", options_.name,
                "\" was saved with other settings:", internal::listing(differing),
                "\nMake it as it was, for an optimizer that has the base rates, or go on with these: ",
                "ScheduleStateOptions::allow_other_settings");
  }

  LRScheduler& schedule_;
  LRSchedule* const ours_;
  const ScheduleStateOptions options_;
};

} // namespace

StateDict state_dict(LRScheduler& schedule, const ScheduleStateOptions& options) {
  auto binding = std::make_shared<ScheduleBinding>(schedule, options);
  StateDict state;
  binding->add_entries(state);
  state.bind(std::move(binding));
  return state;
}

} // namespace tessera
