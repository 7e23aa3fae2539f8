#include <tessera/fsdp/memory_prediction.h>

#include <absl/container/flat_hash_set.h>

#include <algorithm>
#include <utility>
#include <vector>

#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/report/predicted_group.h>

namespace tessera::internal {

namespace {

/// The reads of a forward: the groups by their numbers, and which of the reads are their groups' first.
struct PredictedReads {
  std::vector<size_t> groups;
  std::vector<bool> is_first;

  void add(size_t group) {
    is_first.push_back(std::find(groups.begin(), groups.end(), group) == groups.end());
    groups.push_back(group);
  }
};

/// Sends the events of a step through the machine that decides a real one, and sums what that has the groups do. Remembers the
/// moment that holds most.
class Prediction final : private StepGroups {
 public:
  /// `held` is of the root's model, as long as this.
  Prediction(const Held& held, ShardedModule& root, const ExplainOptions& options, MemoryPrediction known)
      : held_(held),
        options_(options),
        plain_gradients_(std::exchange(known.gradients, 0)),
        scheduled_(root.schedule()->groups(held)),
        groups_(scheduled_.size()),
        parts_(scheduled_.size()),
        memory_(root.roles().mesh().device(), std::move(known)) {
    step_.set_places(places_of(scheduled_));
    step_.set_is_last_backward(root.schedule()->step(held).is_last_backward());
    for_each_group(held, root, /*recurse=*/true, [this](const GroupGradients& gradients) { add(gradients); });
    keep_trace(root.schedule()->step(held).trace());
    absl::flat_hash_set<const GroupOwner*> above;
    for (const size_t each : reads_.groups) {
      for (auto* at = state_of_group(*groups_[each].group).parent().get(); at && above.insert(at).second;)
        at = at->parent().get();
    }
    for (const size_t each : reads_.groups) groups_[each].is_above_others = above.contains(groups_[each].group->owner.get());
  }

  MemoryPrediction run() {
    constexpr int kSteps = 4; // the first leaves an order, and the blocks settle
    for (int step = 0; step < kSteps; ++step) {
      memory_.forget_peak();
      forward();
      backward();
      optimize();
    }
    return memory_.peak();
  }

 private:
  void add(const GroupGradients& gradients) {
    const auto& group = gradients.group();
    const bool is_in_files = group.memory() && group.options().offload.memory == OffloadPolicy::Memory::kFiles;
    if (!is_in_files) {
      memory_.now.parameters += static_cast<int64_t>(group.parameters()[0].local.storage().nbytes());
      memory_.now.optimizer_state += options_.optimizer_tensors * trained_bytes_of(group);
    }
    memory_.now.parameters += kept_bytes_of(group);
    add(predicted_group(gradients), group.number, scheduled_[group.number].last_landed == &gradients);
  }

  /// One beside another that is there has its own blocks, and the other's part in the step.
  void add(PredictedGroup added, size_t number, bool lands_last) {
    auto& first = groups_[number];
    if (!first.group) {
      first = std::move(added);
      return parts_[number].push_back(number);
    }
    first.join(added, lands_last);
    parts_[number].push_back(groups_.size());
    groups_.push_back(std::move(added));
  }

  /// Keeps the groups that the last forward read, in its order, if there was one; otherwise all.
  void keep_trace(const std::vector<Step::Part>& parts) {
    for (const auto& part : parts) {
      if (!groups_[part.group].group) continue;
      groups_[part.group].backward = part.backward;
      reads_.add(part.group);
    }
    if (!reads_.groups.empty()) return;
    for (size_t each = 0; each < scheduled_.size(); ++each) {
      if (groups_[each].group) reads_.add(each);
    }
  }

  // The events of a step.

  void read(size_t number, bool in_backward, uint64_t recomputation = 0) {
    if (is_stale(number)) step_.written(number);
    step_.read({number, residence(number), in_backward, recomputation});
  }

  /// The second run of what `number` was computed in reads all that the first did.
  void recompute(size_t number) {
    const uint64_t which = groups_[number].backward.recomputation;
    if (which == 0 || which == recomputed_) return;
    recomputed_ = which;
    for (const size_t each : reads_.groups) {
      if (groups_[each].backward.recomputation == which) read(each, /*in_backward=*/true, which);
    }
  }

  /// Activations of the first `groups` of the forward are held.
  void hold_activations(size_t groups) {
    memory_.now.activations =
        options_.activation_bytes * static_cast<int64_t>(groups) / static_cast<int64_t>(reads_.groups.size());
  }

  void forward() {
    step_.begin_forward();
    for (size_t i = 0; i < reads_.groups.size(); ++i) {
      memory_.begin("forward of " + groups_[reads_.groups[i]].group->label());
      read(reads_.groups[i], /*in_backward=*/false);
      hold_activations(i + 1);
      memory_.note();
    }
  }

  void backward() {
    memory_.now.gradients += plain_gradients_;
    step_.begin_backward();
    recomputed_ = 0;
    for (auto& group : groups_) group.landed.summed = 0;
    for (const size_t each : reads_.groups) {
      memory_.begin("backward of " + groups_[each].group->label());
      if (groups_[each].is_above_others) fill(each);
    }
    for (size_t left = reads_.groups.size(); left > 0; --left) backward(left - 1);
    step_.reduce_the_rest();
    step_reduced();
    step_.end_backward();
  }

  /// Optimizers that step in backward take the gradients that are reduced, a group at a time.
  void step_reduced() {
    for (const size_t number : std::exchange(reduced_, {})) {
      auto& group = groups_[number];
      const int64_t made = options_.optimizer_tensors >= 2 ? 2 * group.gradients.largest_local : 0;
      memory_.now.temporaries += made;
      memory_.note();
      memory_.now.temporaries -= made;
      memory_.now.gradients -= group.reduction.delivered_bytes();
      group.gathered.note_write();
    }
  }
  void hold_reduced(size_t number) {
    memory_.now.gradients += groups_[number].reduction.delivered_bytes();
    if (groups_[number].steps) reduced_.push_back(number);
  }

  /// The backward of one read. Autograd sums the gradients of all reads of a parameter before they land: two and their sum are
  /// there at once.
  void backward(size_t read_number) {
    const size_t number = reads_.groups[read_number];
    auto& group = groups_[number];
    auto& temporaries = memory_.now.temporaries;
    memory_.begin("backward of " + group.group->label());
    recompute(number);
    if (group.backward.is_read) read(number, /*in_backward=*/true);
    const bool is_last = reads_.is_first[read_number];
    if (is_last) fill(number);
    const int64_t made = (group.landed.summed > 0 ? 2 : 1) * group.gradients.largest;
    temporaries += made;
    memory_.note();
    hold_activations(read_number);
    temporaries -= made;
    if (!is_last) {
      temporaries += group.gradients.all - std::exchange(group.landed.summed, group.gradients.all);
      return memory_.note();
    }
    temporaries += group.gradients.last - std::exchange(group.landed.summed, 0);
    land(number); // all of its gradients are there, and what they were computed from is not
    memory_.note();
    temporaries -= group.gradients.last;
  }

  /// The first gradient lands.
  void fill(size_t number) {
    auto& group = groups_[number];
    if (!group.lands()) return;
    const bool is_in_block = group.group->stages().reduce_scatter() != nullptr;
    step_.expect_landing(number, group.settings->has_only_buffer && !group.reduction.has_buffer() && is_in_block);
    group.landed.is_pending = true;
    for (const size_t part : parts_[number]) groups_[part].reduction.allocate(*groups_[part].group, memory_);
  }

  void land(size_t number) {
    groups_[number].landed.is_complete = groups_[number].lands();
    if (!groups_[number].lands() || !step_.landed(number, /*is_complete=*/true)) return;
    step_.reduce_after(number);
    step_reduced();
  }

  /// LibTorch's Adam makes two tensors of a parameter's shape. None steps while gradients wait for a later backward.
  void optimize() {
    const auto waits = [](const PredictedGroup& group) { return group.landed.is_pending; };
    if (std::any_of(groups_.begin(), groups_.end(), waits)) return;
    int64_t largest = 0;
    for (const size_t each : reads_.groups) {
      for (const size_t part : parts_[each])
        largest = std::max(largest, groups_[part].steps ? 0 : groups_[part].gradients.largest_local);
    }
    memory_.now.temporaries = options_.optimizer_tensors >= 2 ? 2 * largest : 0;
    memory_.begin("optimizer");
    memory_.note();
    memory_.now.gradients = memory_.now.temporaries = 0; // by `zero_grad`
    for (auto& group : groups_) group.gathered.note_write();
  }

  // What the machine asks, and decides.

  GroupRules rules(size_t group) const override { return scheduled_[group].rules(held_); }
  Residence residence(size_t number) const override {
    if (!groups_[number].group) return Residence::kGone;
    auto least = Residence::kUnsharded;
    for (const size_t part : parts_[number]) {
      if (groups_[part].group->needs_gather()) least = std::min(least, groups_[part].gathered.residence());
    }
    return least;
  }
  bool has_memory(size_t group) const override { return groups_[group].group != nullptr; }
  bool is_stale(size_t number) const override {
    return std::any_of(parts_[number].begin(), parts_[number].end(),
                       [&](size_t part) { return groups_[part].gathered.is_stale() && groups_[part].group->needs_gather(); });
  }
  std::vector<size_t> prefetch_list(size_t group, bool in_backward) const override {
    return scheduled_[group].prefetch_list(in_backward);
  }

  void gather(size_t number) override {
    for (const size_t part : parts_[number]) groups_[part].gathered.start(*groups_[part].group, memory_);
    memory_.note();
  }
  void wait(size_t number) override {
    for (const size_t part : parts_[number]) groups_[part].gathered.finish(memory_);
  }
  void free(size_t number) override {
    for (const size_t part : parts_[number]) groups_[part].gathered.free(memory_);
  }
  void free_after_forward(size_t number) override {
    for (const size_t part : parts_[number]) groups_[part].gathered.free_after_forward(*groups_[part].group, memory_);
  }
  void fetch(size_t /*group*/) override {}

  bool expects_any(size_t group) const override { return groups_[group].trains; }
  bool is_complete(size_t group) const override { return groups_[group].landed.is_complete; }
  bool awaits_any(size_t group) const override { return groups_[group].lands() && !groups_[group].landed.is_complete; }
  bool has_pending(size_t group) const override { return groups_[group].landed.is_pending; }
  bool is_unfinished(size_t number) const override {
    const auto& parts = parts_[number];
    const auto is_reducing = [&](size_t part) { return groups_[part].reduction.is_running(); };
    return groups_[number].landed.is_pending || std::any_of(parts.begin(), parts.end(), is_reducing);
  }
  bool leaves_out_any(size_t group) const override { return groups_[group].leaves_out_any; }
  bool is_in_inner_backward() const override { return false; }

  void forget_landed(size_t group) override { groups_[group].landed.is_complete = false; }
  void join_reduction(size_t group) override { groups_[group].landed.is_pending = groups_[group].trains; }
  void keep_unreduced(size_t group) override { groups_[group].landed.is_complete = false; }
  void withhold_unreduced(size_t /*group*/) override {}

  bool start_reduction(size_t number) override {
    groups_[number].landed.is_pending = groups_[number].landed.is_complete = false;
    bool is_reducing = false;
    for (const size_t part : parts_[number]) {
      const bool is_started = groups_[part].reduction.start(*groups_[part].group, memory_);
      if (!is_started) hold_reduced(part);
      is_reducing = is_reducing || is_started;
    }
    return is_reducing;
  }
  void advance_reduction(size_t number) override {
    for (const size_t part : parts_[number]) groups_[part].reduction.advance(*groups_[part].group, memory_);
  }
  void finish_reduction(size_t number) override {
    for (const size_t part : parts_[number]) {
      auto& group = groups_[part];
      if (!group.reduction.is_running()) continue;
      group.reduction.finish(*group.group, memory_);
      hold_reduced(part);
    }
  }

  const Held& held_;
  ExplainOptions options_;
  int64_t plain_gradients_; // of parameters that no group of the model has
  const std::vector<ScheduledGroup>& scheduled_;
  std::vector<PredictedGroup> groups_;     // by their numbers, and then those beside others
  std::vector<std::vector<size_t>> parts_; // of each number: its place in `groups_`, and those of groups beside it
  PredictedReads reads_;                   // of the last forward, if there was one
  uint64_t recomputed_ = 0;                // last in this backward
  std::vector<size_t> reduced_;            // groups whose gradients wait for their step in this backward
  Step step_{*this};
  MemoryAccount memory_;
};

} // namespace

MemoryPrediction predict_memory(const Held& held, ShardedModule& root, const ExplainOptions& options, MemoryPrediction known) {
  return Prediction(held, root, options, std::move(known)).run();
}

} // namespace tessera::internal
