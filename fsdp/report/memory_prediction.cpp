#include <tessera/fsdp/memory_prediction.h>

#include <ATen/ceil_div.h>
#include <c10/core/ScalarType.h>

#include <absl/container/flat_hash_set.h>

#include <algorithm>
#include <utility>
#include <variant>
#include <vector>

#include <tessera/base/free_blocks.h>
#include <tessera/fsdp/buffers/bytes_of.h>
#include <tessera/fsdp/gradients/gradient_layout.h>
#include <tessera/fsdp/model/sharded_module.h>

namespace tessera::internal {

namespace {

int64_t chunk_bytes_of(const ParameterGroup& group) {
  if (!trains_any(group)) return 0;
  const auto layout = plan_reduce(group.layout(), trained_of(group));
  return layout.chunk_numel * static_cast<int64_t>(c10::elementSize(reduce_dtype_of(group, trained_of(group))));
}

/// Bytes that a rank sends in a gather. What an extension sends is unknown before the first gather: the rank's part in the dtype
/// that forward reads stands for it.
int64_t sent_bytes_of(const ParameterGroup& group) {
  int64_t bytes = group.layout().shard_bytes;
  for (size_t i = 0; i < group.parameters().size(); ++i) {
    if (!group.extended().contains(i)) continue;
    const auto& parameter = group.parameters()[i];
    const auto part = at::ceil_div(parameter.unsharded_numel(), int64_t{group.roles().shard_ranks()});
    bytes += at::round_up(part * static_cast<int64_t>(c10::elementSize(parameter.unsharded_dtype)), kParameterAlignment);
  }
  return bytes;
}

/// Bytes of the parts from which gathers start, that the stages before the innermost one have gathered.
int64_t kept_until_written(const ParameterGroup& group) {
  const auto& stages = group.stages();
  int64_t part = sent_bytes_of(group), kept = 0;
  for (size_t stage = 0; stage < stages.innermost(); ++stage) kept += part *= stages.gathers[stage].ranks();
  return kept;
}

/// Bytes that an extension of the group's reductions keeps.
int64_t kept_by_reductions(const ParameterGroup& group) {
  if (!trains_any(group)) return 0;
  const auto takes_part = trained_of(group);
  const auto layout = plan_reduce(group.layout(), takes_part);
  const auto extension = make_reduction_extension(group, takes_part, layout, reduce_dtype_of(group, takes_part));
  return extension ? extension->state_bytes() : 0;
}

/// The blocks of a model, which BlockCache keeps and hands out on the CPU; another device's allocator does.
class Blocks {
 public:
  explicit Blocks(c10::Device device) : keeps_(device.is_cpu()) {}

  /// The size of the block.
  int64_t take(int64_t bytes) { return keeps_ ? kept_.take(bytes).first : bytes; }
  void give_back(int64_t size) {
    if (keeps_) kept_.add(size, {});
  }
  int64_t cached() const { return kept_.bytes(); }

 private:
  bool keeps_;
  FreeBlocks<std::monostate> kept_;
};

/// What the prediction knows of a group.
struct Group {
  std::shared_ptr<ParameterGroup> group; ///< null for a number that no group below the root has
  const GradientSettings* settings = nullptr;
  bool trains = false, leaves_out_any = false;
  bool lands = false;           // some gradient
  bool backward_reads = true;   // not where no gradient of an input needs it
  uint64_t recomputation = 0;   // whose second run reads it
  bool is_above_others = false; // whose gradients begin to land at the start of a backward
  int64_t reduce_bytes = 0;     // of its buffer
  int64_t chunk_bytes = 0;      // of this rank's part of it
  int64_t reduced_bytes = 0;    // as `grad()` holds them
  bool steps = false;           // in backward, all of its parameters
  int64_t largest_gradient = 0; // of one parameter, whole
  int64_t last_gradient = 0;    // the one that lands last
  int64_t all_gradients = 0;    // of all parameters, whole
  int64_t largest_local = 0;

  Residence residence = Residence::kSharded;
  bool is_stale = false;                                // written since its gather
  int64_t unsharded = 0, gather_output = 0, buffer = 0; // blocks that it has now
  int64_t messages = 0;                                 // a block of what a quantized gather sends
  int64_t kept_part = 0;                                // of the unsharded parameters, after its forward
  int64_t reduced = 0;                                  // what its reduction has written
  int64_t summed = 0;                                   // gradients that autograd holds of its later reads
  bool is_complete = false;                             // all of its gradients have landed
  bool is_pending = false;                              // some wait for their reduction
  bool is_reducing = false;
  bool has_advanced = false; // beyond the first of its collectives
};

/// Sends the events of a step through the machine that decides a real one, and sums what that has the groups do. Remembers the
/// moment that holds most.
class Prediction final : private StepGroups {
 public:
  Prediction(ShardedModule& root, const ExplainOptions& options, MemoryPrediction known)
      : options_(options),
        plain_gradients_(std::exchange(known.gradients, 0)),
        scheduled_(root.schedule()->groups()),
        groups_(scheduled_.size()),
        parts_(scheduled_.size()),
        blocks_(root.roles().mesh().device()),
        now_(std::move(known)) {
    step_.set_places(places_of(scheduled_));
    step_.set_is_last_backward(root.schedule()->step().is_last_backward());
    for_each_group(root, /*recurse=*/true, [this](const GroupGradients& gradients) { add(gradients); });
    keep_trace(root.schedule()->step().trace());
    absl::flat_hash_set<const GroupOwner*> above;
    for (const size_t each : order_) {
      for (auto* at = state_of_group(*groups_[each].group).parent().get(); at && above.insert(at).second;)
        at = at->parent().get();
    }
    for (const size_t each : order_) groups_[each].is_above_others = above.contains(groups_[each].group->owner.get());
  }

  MemoryPrediction run() {
    constexpr int kSteps = 4; // the first leaves an order, and the blocks settle
    for (int step = 0; step < kSteps; ++step) {
      peak_ = {};
      forward();
      backward();
      optimize();
    }
    return peak_;
  }

 private:
  void add(const GroupGradients& gradients) {
    const auto group = gradients.group().shared_from_this();
    Group added{.group = group, .settings = &gradients.settings};
    added.reduce_bytes = reduce_bytes_of(*group);
    added.trains = added.lands = trains_any(*group);
    added.steps = added.trains && steps_in_backward(gradients);
    const bool is_in_files = group->memory() && group->options().offload.memory == OffloadPolicy::Memory::kFiles;
    const auto shard = add_parameters(added, last_to_land(gradients));
    const bool reduces = !group->stages().reductions.empty();
    added.chunk_bytes = reduces ? chunk_bytes_of(*group) : 0;
    added.reduced_bytes = reduces && !casts_gradients(*group) ? added.chunk_bytes : shard;
    if (!is_in_files) {
      now_.parameters += static_cast<int64_t>(group->parameters()[0].local.storage().nbytes());
      now_.optimizer_state += options_.optimizer_tensors * shard;
    } else {
      added.reduced_bytes = 0;
    }
    now_.parameters += kept_until_written(*group) + kept_by_reductions(*group);
    add(std::move(added), group->number, scheduled_[group->number].last_landed == &gradients);
  }

  /// One beside another that is there has its own blocks, and the other's part in the step.
  void add(Group added, size_t number, bool lands_last) {
    auto& first = groups_[number];
    if (!first.group) {
      first = std::move(added);
      return parts_[number].push_back(number);
    }
    first.trains = first.lands = first.trains || added.trains;
    first.leaves_out_any = first.leaves_out_any || added.leaves_out_any;
    if (lands_last) first.last_gradient = added.last_gradient;
    first.all_gradients += added.all_gradients;
    first.largest_gradient = std::max(first.largest_gradient, added.largest_gradient);
    parts_[number].push_back(groups_.size());
    groups_.push_back(std::move(added));
  }

  /// The memory of a group's gradients is freed with the last one of them.
  static bool steps_in_backward(const GroupGradients& gradients) {
    const auto& parameters = gradients.group().parameters();
    return std::all_of(parameters.begin(), parameters.end(), [&](const auto& parameter) {
      const auto frees = [&](const auto& taker) { return taker->frees(parameter.tensor._unsafe_get_target()); };
      const auto& takers = gradients.settings.takers;
      return !is_trained(parameter) || std::any_of(takers.begin(), takers.end(), frees);
    });
  }

  /// Notes what the gradients of the group's parameters need. Returns the bytes of this rank's part of those that train.
  static int64_t add_parameters(Group& added, size_t last) {
    int64_t shard = 0;
    for (size_t index = 0; index < added.group->parameters().size(); ++index) {
      const auto& parameter = added.group->parameters()[index];
      if (!is_trained(parameter)) {
        added.leaves_out_any = true;
        continue;
      }
      const auto whole = parameter.unsharded_numel(), local = bytes_of(parameter.local);
      shard += local;
      const auto gradient = whole * static_cast<int64_t>(c10::elementSize(parameter.unsharded_dtype));
      if (index == last) added.last_gradient = gradient;
      added.all_gradients += gradient;
      added.largest_gradient = std::max(added.largest_gradient, gradient);
      added.largest_local = std::max(added.largest_local, local);
    }
    return shard;
  }

  /// It is the one of the last backward. Before any, it is what is registered first, as the weight of a linear layer.
  static size_t last_to_land(const GroupGradients& gradients) {
    const auto& parameters = gradients.group().parameters();
    const auto first = std::find_if(parameters.begin(), parameters.end(), is_trained);
    return gradients.landed().last().value_or(static_cast<size_t>(first - parameters.begin()));
  }

  /// Keeps the groups that the last forward read, in its order, if there was one; otherwise all.
  void keep_trace(const std::vector<Step::Part>& parts) {
    for (const auto& part : parts) {
      auto& group = groups_[part.group];
      if (!group.group) continue;
      group.recomputation = part.backward.recomputation;
      group.backward_reads = part.backward.is_read;
      group.lands = group.trains && part.backward.brings_gradients;
      add_read(part.group);
    }
    if (!order_.empty()) return;
    for (size_t each = 0; each < scheduled_.size(); ++each) {
      if (groups_[each].group) add_read(each);
    }
  }
  void add_read(size_t group) {
    is_first_.push_back(std::find(order_.begin(), order_.end(), group) == order_.end());
    order_.push_back(group);
  }

  /// The reduced gradients have another dtype than the parameters, and are copied.
  static bool casts_gradients(const ParameterGroup& group) {
    return group.parameters()[0].spec->dtype() != reduce_dtype_of(group, trained_of(group));
  }

  void note() {
    now_.cached = blocks_.cached();
    now_.peak = now_.parameters + now_.buffers + now_.optimizer_state + now_.gradients + now_.unsharded + now_.reduce_buffers +
                now_.cached + now_.activations + now_.temporaries;
    if (now_.peak <= peak_.peak) return;
    peak_ = now_;
    peak_.peak_at = what_;
  }

  // The events of a step.

  void read(size_t number, bool in_backward, uint64_t recomputation = 0) {
    if (is_stale(number)) step_.written(number);
    step_.read({number, residence(number), in_backward, recomputation});
  }

  /// The second run of what `number` was computed in reads all that the first did.
  void recompute(size_t number) {
    const uint64_t which = groups_[number].recomputation;
    if (which == 0 || which == recomputed_) return;
    recomputed_ = which;
    for (const size_t each : order_) {
      if (groups_[each].recomputation == which) read(each, /*in_backward=*/true, which);
    }
  }

  /// Activations of the first `groups` of the forward are held.
  void hold_activations(size_t groups) {
    now_.activations = options_.activation_bytes * static_cast<int64_t>(groups) / static_cast<int64_t>(order_.size());
  }

  void forward() {
    step_.begin_forward();
    for (size_t i = 0; i < order_.size(); ++i) {
      what_ = "forward of " + groups_[order_[i]].group->label();
      read(order_[i], /*in_backward=*/false);
      hold_activations(i + 1);
      note();
    }
  }

  void backward() {
    now_.gradients += plain_gradients_;
    step_.begin_backward();
    recomputed_ = 0;
    for (auto& group : groups_) group.summed = 0;
    for (const size_t each : order_) {
      what_ = "backward of " + groups_[each].group->label();
      if (groups_[each].is_above_others) fill(each);
    }
    for (size_t left = order_.size(); left > 0; --left) backward(left - 1);
    step_.reduce_the_rest();
    step_reduced();
    step_.end_backward();
  }

  /// Optimizers that step in backward take the gradients that are reduced, a group at a time.
  void step_reduced() {
    for (const size_t number : std::exchange(reduced_, {})) {
      auto& group = groups_[number];
      now_.temporaries += options_.optimizer_tensors >= 2 ? 2 * group.largest_local : 0;
      note();
      now_.temporaries -= options_.optimizer_tensors >= 2 ? 2 * group.largest_local : 0;
      now_.gradients -= group.reduced_bytes;
      group.is_stale = true;
    }
  }
  void hold_reduced(size_t number) {
    now_.gradients += groups_[number].reduced_bytes;
    if (groups_[number].steps) reduced_.push_back(number);
  }

  /// The backward of one read. Autograd sums the gradients of all reads of a parameter before they land: two and their sum are
  /// there at once.
  void backward(size_t read_number) {
    const size_t number = order_[read_number];
    auto& group = groups_[number];
    what_ = "backward of " + group.group->label();
    recompute(number);
    if (group.backward_reads) read(number, /*in_backward=*/true);
    const bool is_last = is_first_[read_number];
    if (is_last) fill(number);
    const int64_t made = (group.summed > 0 ? 2 : 1) * group.largest_gradient;
    now_.temporaries += made;
    note();
    hold_activations(read_number);
    now_.temporaries -= made;
    if (!is_last) {
      now_.temporaries += group.all_gradients - std::exchange(group.summed, group.all_gradients);
      return note();
    }
    now_.temporaries += group.last_gradient - std::exchange(group.summed, 0);
    land(number); // all of its gradients are there, and what they were computed from is not
    note();
    now_.temporaries -= group.last_gradient;
  }

  /// The first gradient lands.
  void fill(size_t number) {
    auto& group = groups_[number];
    if (!group.lands) return;
    step_.expect_landing(number, group.settings->has_only_buffer && group.buffer == 0 && has_block(group));
    group.is_pending = true;
    for (const size_t part : parts_[number]) make_buffer(groups_[part]);
  }
  static bool has_block(const Group& group) { return group.group->stages().reduce_scatter() != nullptr; }
  void make_buffer(Group& group) {
    if (group.buffer > 0 || group.reduce_bytes == 0) return;
    group.buffer = has_block(group) ? blocks_.take(group.reduce_bytes) : group.reduce_bytes; // the gradients stay in it
    now_.reduce_buffers += group.buffer;
  }

  void land(size_t number) {
    groups_[number].is_complete = groups_[number].lands;
    if (!groups_[number].lands || !step_.landed(number, /*is_complete=*/true)) return;
    step_.reduce_after(number);
    step_reduced();
  }

  /// LibTorch's Adam makes two tensors of a parameter's shape. None steps while gradients wait for a later backward.
  void optimize() {
    const auto waits = [](const Group& group) { return group.is_pending; };
    if (std::any_of(groups_.begin(), groups_.end(), waits)) return;
    int64_t largest = 0;
    for (const size_t each : order_) {
      for (const size_t part : parts_[each]) largest = std::max(largest, groups_[part].steps ? 0 : groups_[part].largest_local);
    }
    now_.temporaries = options_.optimizer_tensors >= 2 ? 2 * largest : 0;
    what_ = "optimizer";
    note();
    now_.gradients = now_.temporaries = 0; // by `zero_grad`
    for (auto& group : groups_) group.is_stale = true;
  }

  // What the machine asks, and decides.

  GroupRules rules(size_t group) const override { return scheduled_[group].rules(); }
  Residence residence(size_t number) const override {
    if (!groups_[number].group) return Residence::kGone;
    auto least = Residence::kUnsharded;
    for (const size_t part : parts_[number]) {
      if (groups_[part].group->needs_gather()) least = std::min(least, groups_[part].residence);
    }
    return least;
  }
  bool has_memory(size_t group) const override { return groups_[group].group != nullptr; }
  bool is_stale(size_t number) const override {
    return std::any_of(parts_[number].begin(), parts_[number].end(),
                       [&](size_t part) { return groups_[part].is_stale && groups_[part].group->needs_gather(); });
  }
  std::vector<size_t> prefetch_list(size_t group, bool in_backward) const override {
    return scheduled_[group].prefetch_list(in_backward);
  }

  void gather(size_t number) override {
    for (const size_t part : parts_[number]) gather(groups_[part]);
    note();
  }
  void gather(Group& group) {
    if (!group.group->needs_gather() || is_open(group.residence)) return;
    const auto& layout = group.group->layout();
    group.residence = Residence::kGathering;
    group.is_stale = false;
    group.unsharded = blocks_.take(layout.unsharded_bytes);
    now_.unsharded += group.unsharded;
    if (!layout.gathers_in_place && group.kept_part == 0) {
      group.gather_output = blocks_.take(sent_bytes_of(*group.group) * group.group->roles().shard_ranks());
      now_.unsharded += group.gather_output;
    }
    if (!group.group->messages().is_empty() && group.kept_part == 0) {
      group.messages = blocks_.take(group.group->gather_payload(group.group->stages().innermost()));
      now_.unsharded += group.messages;
    }
  }

  void wait(size_t number) override {
    for (const size_t part : parts_[number]) wait(groups_[part]);
  }
  void wait(Group& group) {
    if (group.residence != Residence::kGathering) return;
    group.residence = Residence::kUnsharded;
    now_.unsharded -= group.gather_output;
    if (group.gather_output > 0) blocks_.give_back(std::exchange(group.gather_output, 0));
    now_.unsharded -= group.messages;
    if (group.messages > 0) blocks_.give_back(std::exchange(group.messages, 0));
  }

  void free(size_t number) override {
    for (const size_t part : parts_[number]) {
      now_.parameters -= std::exchange(groups_[part].kept_part, 0);
      release(groups_[part]);
    }
  }

  void free_after_forward(size_t number) override {
    for (const size_t part : parts_[number]) free_after_forward(groups_[part]);
  }
  /// The part that is kept is a copy, made before the rest is freed.
  void free_after_forward(Group& group) {
    const auto& stages = group.group->stages();
    if (stages.has_after_forward() && group.residence == Residence::kUnsharded && !group.is_stale && group.kept_part == 0) {
      group.kept_part = group.group->layout().unsharded_bytes / stages.gathers.back().ranks();
      now_.parameters += group.kept_part;
      note();
    }
    release(group);
  }

  void release(Group& group) {
    wait(group);
    if (group.residence != Residence::kUnsharded) return;
    group.residence = Residence::kSharded;
    now_.unsharded -= group.unsharded;
    blocks_.give_back(std::exchange(group.unsharded, 0));
  }

  void fetch(size_t /*group*/) override {}

  bool expects_any(size_t group) const override { return groups_[group].trains; }
  bool is_complete(size_t group) const override { return groups_[group].is_complete; }
  bool awaits_any(size_t group) const override { return groups_[group].lands && !groups_[group].is_complete; }
  bool has_pending(size_t group) const override { return groups_[group].is_pending; }
  bool is_unfinished(size_t number) const override {
    const auto& parts = parts_[number];
    return groups_[number].is_pending ||
           std::any_of(parts.begin(), parts.end(), [&](size_t part) { return groups_[part].is_reducing; });
  }
  bool leaves_out_any(size_t group) const override { return groups_[group].leaves_out_any; }
  bool is_in_inner_backward() const override { return false; }

  void forget_landed(size_t group) override { groups_[group].is_complete = false; }
  void join_reduction(size_t group) override { groups_[group].is_pending = groups_[group].trains; }
  void keep_unreduced(size_t group) override { groups_[group].is_complete = false; }
  void withhold_unreduced(size_t /*group*/) override {}

  bool start_reduction(size_t number) override {
    groups_[number].is_pending = groups_[number].is_complete = false;
    bool is_reducing = false;
    for (const size_t part : parts_[number]) is_reducing = start_reduction_of(part) || is_reducing;
    return is_reducing;
  }
  bool start_reduction_of(size_t part) {
    auto& group = groups_[part];
    if (group.reduce_bytes == 0) {
      hold_reduced(part);
      return false;
    }
    group.is_reducing = true;
    if (const auto& inside = group.group->stages().reduce_scatter()) write_reduced(group, group.reduce_bytes / inside->size());
    return true;
  }

  void write_reduced(Group& group, int64_t bytes) {
    group.reduced += bytes;
    now_.reduce_buffers += bytes;
    note();
  }

  void advance_reduction(size_t number) override {
    for (const size_t part : parts_[number]) advance(groups_[part]);
  }
  /// The first of its collectives has ended.
  void advance(Group& group) {
    if (!group.is_reducing || std::exchange(group.has_advanced, true)) return;
    const auto& stages = group.group->stages();
    if (stages.reduce_scatter()) {
      now_.reduce_buffers -= group.buffer;
      blocks_.give_back(std::exchange(group.buffer, 0));
    }
    if (stages.may_wait() && stages.reductions.back().kind == Stage::Kind::kReduceScatter)
      write_reduced(group, group.chunk_bytes);
    note();
  }

  void finish_reduction(size_t number) override {
    for (const size_t part : parts_[number]) {
      auto& group = groups_[part];
      if (!group.is_reducing) continue;
      advance(group);
      now_.reduce_buffers -= std::exchange(group.buffer, 0) + std::exchange(group.reduced, 0);
      hold_reduced(part);
      group.has_advanced = group.is_reducing = false;
    }
  }

  ExplainOptions options_;
  int64_t plain_gradients_; // of parameters that no group of the model has
  const std::vector<ScheduledGroup>& scheduled_;
  std::vector<Group> groups_;              // by their numbers, and then those beside others
  std::vector<std::vector<size_t>> parts_; // of each number: its place in `groups_`, and those of groups beside it
  std::vector<size_t> order_;              // of the last forward's reads, if there was one
  std::vector<bool> is_first_;             // of their groups' reads
  uint64_t recomputed_ = 0;                // last in this backward
  std::vector<size_t> reduced_;            // groups whose gradients wait for their step in this backward
  Step step_{*this};
  Blocks blocks_;
  std::string what_; // happens now
  MemoryPrediction now_, peak_;
};

} // namespace

int64_t reduce_bytes_of(const ParameterGroup& group) {
  return !group.stages().reductions.empty() ? chunk_bytes_of(group) * group.roles().shard_ranks() : 0;
}

MemoryPrediction predict_memory(ShardedModule& root, const ExplainOptions& options, MemoryPrediction known) {
  return Prediction(root, options, std::move(known)).run();
}

} // namespace tessera::internal
