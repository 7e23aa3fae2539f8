#pragma once

// Internal: the gradients of a model that are on their way to their parameters.

#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <utility>

#include <tessera/fsdp/gradients/group_gradients.h>

namespace tessera::internal {

/// The parts of a graph task in which no backward has begun.
struct EarlyParts {
  int graph_task_id;
  ReadyGradients parts;
};

/// Holds reduced gradients until they may be delivered: after the event that brought them, or, of those that are copied to the
/// host, of parts and of terms, at the end of the backward.
class Deliveries {
 public:
  ReadyGradients& ready() { return ready_; }
  /// Takes those that wait for nothing.
  ReadyGradients take() {
    ReadyGradients taken = std::exchange(ready_, {});
    const auto waits = [](const auto& each) { return each.copy != nullptr || each.is_part || each.is_term; };
    if (std::none_of(taken.begin(), taken.end(), waits)) return taken;
    const auto waiting = std::stable_partition(taken.begin(), taken.end(), std::not_fn(waits));
    append(waiting, taken.end());
    taken.erase(waiting, taken.end());
    return taken;
  }
  void add(ReadyGradient gradient) { ready_.push_back(std::move(gradient)); }
  void add(EarlyParts& early) {
    append(early.parts.begin(), early.parts.end());
    early.parts.clear();
  }
  void drop(const ParameterGroup& group) {
    std::erase_if(ready_, [&](const auto& each) { return each.group.get() == &group; });
  }
  /// Drops all. They own their groups, which own their model, which may end with what this returns.
  ReadyGradients drop() { return std::exchange(ready_, {}); }

  /// Holds those of which `is_part` says that the backward brings another part.
  template <typename IsPart> // bool(const ShardedParameter&)
  void hold_parts(const IsPart& is_part) {
    for (auto& each : ready_) each.is_part = each.is_part || is_part(each.group->parameters()[each.index]);
  }
  /// Replaces the held gradients of one parameter by their sum.
  void join_parts() {
    for (size_t i = 0; i < ready_.size(); ++i) {
      if (!std::exchange(ready_[i].is_part, false)) continue;
      const auto same = [&](const auto& each) { return each.group == ready_[i].group && each.index == ready_[i].index; };
      const auto other = std::find_if(ready_.begin() + static_cast<std::ptrdiff_t>(i) + 1, ready_.end(), same);
      if (other == ready_.end()) continue;
      internal::add(*other, ready_[i]);
      other->is_part = true; // and perhaps of a third
      ready_.erase(ready_.begin() + static_cast<std::ptrdiff_t>(i--));
    }
  }
  /// Waits for copies to the host, once for all: the last one ends last.
  void wait_for_copies() {
    std::for_each(ready_.rbegin(), ready_.rend(), [](auto& each) {
      if (const auto copy = std::exchange(each.copy, nullptr)) copy->wait();
    });
  }

  /// The parts of graph task `id`; null where these are the first.
  std::shared_ptr<EarlyParts> early(int id) const {
    auto early = early_.lock();
    return early && early->graph_task_id == id ? early : nullptr;
  }
  /// The first parts of a graph task, which owns them.
  std::shared_ptr<EarlyParts> begin_early(int id) {
    auto early = std::make_shared<EarlyParts>(EarlyParts{id, {}});
    early_ = early;
    return early;
  }

 private:
  void append(ReadyGradients::iterator begin, ReadyGradients::iterator end) {
    ready_.insert(ready_.end(), std::move_iterator(begin), std::move_iterator(end));
  }

  ReadyGradients ready_;
  std::weak_ptr<EarlyParts> early_; // of the graph task that brought some last
};

} // namespace tessera::internal
