#pragma once

// Internal: a group as the schedule of its model knows it.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <tessera/fsdp/gradients/group_gradients.h>
#include <tessera/fsdp/group/model_lock.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/schedule/step.h>

namespace tessera::internal {

using GroupPtr = std::shared_ptr<ParameterGroup>;
using GradientsPtr = std::shared_ptr<Guarded<GroupGradients>>;

/// What is gathered ahead when a group is needed.
struct PrefetchSettings : PrefetchRule {
  using Groups = std::vector<std::weak_ptr<ParameterGroup>>;
  Groups in_forward, in_backward; ///< in place of those of the rule, where there are any
};

/// A group of a module's parameters, and their gradients.
struct ModuleGroup {
  std::weak_ptr<ParameterGroup> group;
  GradientsPtr gradients;
};

/// A group in the schedule of its model, with those beside it: parameters of the same module that lie on other ranks, or that
/// every rank has whole. For the step they are one group: a read of one gathers all, and a gradient of one has all reduced.
struct ScheduledGroup {
  std::weak_ptr<ParameterGroup> group; ///< empty for a module without parameters of its own
  GradientsPtr gradients;
  std::shared_ptr<const PrefetchSettings> prefetch;
  GroupPlace place;
  std::vector<ModuleGroup> beside = {};
  const GroupGradients* last_landed = nullptr; ///< of several, the one that got the last gradient
  uint64_t checked_forward = 0;                ///< the last one whose model was looked at in grad mode

  static Reductions reductions_of(const Stages& stages) {
    if (!stages.reduce_scatter()) return Reductions::kSecondOne;
    return stages.may_wait() ? Reductions::kTwo : Reductions::kOne;
  }
  /// Returns those of one, or of several that are reduced together.
  Reductions reductions(const ParameterGroup& known) const {
    auto all = reductions_of(known.stages());
    for (const auto& each : beside) {
      const GroupPtr other = each.group.lock();
      if (other && reductions_of(other->stages()) != all) all = Reductions::kTwo;
    }
    return all;
  }
  GroupRules rules(const Held& held) const {
    GroupPtr known = group.lock();
    for (size_t i = 0; !known && i < beside.size(); ++i) known = beside[i].group.lock();
    if (!known) return {};
    const auto& settings = gradients->get(held).settings;
    return {.reshards_after_forward = known->owner->reshards_after_forward(),
            .reshards_after_backward = settings.reshard_after_backward,
            .is_offloaded = known->memory() != nullptr,
            .prefetch = *prefetch,
            .syncs = settings.sync(),
            .keeps_gradients = known->roles().keeps_gradients(),
            .reductions = reductions(*known)};
  }
  /// The gradients of `part`, which is the group or one beside it; null for any other.
  GroupGradients* gradients_of(const ParameterGroup& part, const Held& held) const {
    const auto are_of_part = [&](const GradientsPtr& each) { return each && &each->get(held).group() == &part; };
    if (are_of_part(gradients)) return &gradients->get(held);
    for (const auto& each : beside) {
      if (are_of_part(each.gradients)) return &each.gradients->get(held);
    }
    return nullptr;
  }
  /// Calls `visit` of the group and of those beside it that are there.
  template <typename Visit> // void(ParameterGroup&, GroupGradients&)
  void for_each_part(const Held& held, const Visit& visit) const {
    if (const GroupPtr known = group.lock()) visit(*known, gradients->get(held));
    for (const auto& each : beside) {
      if (const GroupPtr known = each.group.lock()) visit(*known, each.gradients->get(held));
    }
  }
  /// The numbers of the groups that it lists to be gathered ahead.
  std::vector<size_t> prefetch_list(bool in_backward) const {
    std::vector<size_t> numbers;
    for (const auto& each : in_backward ? prefetch->in_backward : prefetch->in_forward) {
      if (const GroupPtr listed = each.lock()) numbers.push_back(listed->number);
    }
    return numbers;
  }
};

inline std::vector<GroupPlace> places_of(const std::vector<ScheduledGroup>& groups) {
  std::vector<GroupPlace> places;
  places.reserve(groups.size());
  for (const auto& each : groups) places.push_back(each.place);
  return places;
}

} // namespace tessera::internal
