#include <tessera/fsdp/memory_prediction.h>

#include <ATen/ceil_div.h>
#include <c10/core/ScalarType.h>

#include <absl/container/flat_hash_map.h>
#include <absl/container/flat_hash_set.h>

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <utility>
#include <variant>

#include <tessera/collectives/free_blocks.h>
#include <tessera/fsdp/bytes_of.h>
#include <tessera/fsdp/sharded_module.h>

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
    const auto part = at::ceil_div(parameter.spec->numel(), int64_t{group.axes().shard_ranks()});
    bytes += at::round_up(part * static_cast<int64_t>(c10::elementSize(parameter.unsharded_dtype)), kParameterAlignment);
  }
  return bytes;
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
  std::shared_ptr<ParameterGroup> group;
  const GradientSettings* settings;
  bool is_above_others = false; // whose gradients begin to land at the start of a backward
  int64_t reduce_bytes = 0;     // of its buffer
  int64_t chunk_bytes = 0;      // of this rank's part of it
  int64_t reduced_bytes = 0;    // as `grad()` holds them
  int64_t largest_gradient = 0; // of one parameter, whole
  int64_t last_gradient = 0;    // the one that lands last: of the parameter that is registered first
  int64_t largest_local = 0;

  int64_t unsharded = 0, gather_output = 0, buffer = 0; // blocks that it has now
  int64_t kept_part = 0;                                // of the unsharded parameters, among its neighbours
  int64_t reduced = 0;                                  // what its reduction has written
  bool has_advanced = false;                            // beyond the first of its collectives
  bool is_prefetched = false;                           // and not read yet
};

/// Of the modules of the two groups: `a`'s is `b`'s, or above it.
bool is_above(const Group& a, const Group& b) {
  for (const auto* each = &state_of_group(*b.group); each; each = each->parent().get()) {
    if (each == a.group->owner.get()) return true;
  }
  return false;
}

/// Steps through the events of a step as the schedule does, and remembers the moment that holds most.
class Prediction {
 public:
  Prediction(ShardedModule& root, const ExplainOptions& options, MemoryPrediction known)
      : options_(options),
        plain_gradients_(std::exchange(known.gradients, 0)),
        blocks_(root.axes().mesh().device()),
        now_(std::move(known)) {
    for_each_group(root, /*recurse=*/true, [this](const GroupGradients& gradients) { add(gradients); });
    keep_read(root.schedule()->read_order());
    absl::flat_hash_set<const GroupOwner*> above;
    for (const auto& group : groups_) {
      for (auto* at = state_of_group(*group.group).parent().get(); at && above.insert(at).second;) at = at->parent().get();
    }
    for (auto& group : groups_) group.is_above_others = above.contains(group.group->owner.get());
  }

  MemoryPrediction run() {
    for (const bool is_first : {true, false}) { // the first leaves blocks
      peak_ = {};
      is_first_ = is_first;
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
    const auto& axes = group->axes();
    added.reduce_bytes = reduce_bytes_of(*group);
    const bool is_in_files = group->memory() && group->options().offload.memory == OffloadPolicy::Memory::kFiles;
    int64_t shard = 0;
    for (const auto& parameter : group->parameters()) {
      if (!is_trained(parameter)) continue;
      const auto whole = parameter.spec->numel(), local = bytes_of(parameter.local);
      shard += local;
      const auto gradient = whole * static_cast<int64_t>(c10::elementSize(parameter.unsharded_dtype));
      if (added.largest_gradient == 0) added.last_gradient = gradient;
      added.largest_gradient = std::max(added.largest_gradient, gradient);
      added.largest_local = std::max(added.largest_local, local);
    }
    added.chunk_bytes = axes.reduces() ? chunk_bytes_of(*group) : 0;
    added.reduced_bytes = axes.reduces() && !casts_gradients(*group) ? added.chunk_bytes : shard;
    if (!is_in_files) {
      now_.parameters += static_cast<int64_t>(group->parameters()[0].local.storage().nbytes());
      now_.optimizer_state += options_.optimizer_tensors * shard;
    } else {
      added.reduced_bytes = 0;
    }
    if (axes.outer_all_gather()) now_.parameters += axes.outer_ranks() * sent_bytes_of(*group);
    groups_.push_back(std::move(added));
  }

  /// In the order of the last forward, if there was one.
  void keep_read(const std::vector<std::shared_ptr<ParameterGroup>>& order) {
    absl::flat_hash_map<const ParameterGroup*, const Group*> known;
    for (const auto& group : groups_) known.emplace(group.group.get(), &group);
    std::vector<Group> read;
    for (const auto& each : order) {
      const auto found = known.find(each.get());
      if (found != known.end()) read.push_back(*found->second);
    }
    if (!read.empty()) groups_ = std::move(read);
  }

  /// The reduced gradients have another dtype than the parameters, and are copied.
  static bool casts_gradients(const ParameterGroup& group) {
    return group.parameters()[0].spec->dtype() != reduce_dtype_of(group, trained_of(group));
  }

  void note(const std::string& what) {
    now_.cached = blocks_.cached();
    now_.peak = now_.parameters + now_.buffers + now_.optimizer_state + now_.gradients + now_.unsharded + now_.reduce_buffers +
                now_.cached + now_.activations + now_.temporaries;
    if (now_.peak <= peak_.peak) return;
    peak_ = now_;
    peak_.peak_at = what;
  }

  void start_gather(Group& group, const std::string& what) {
    const auto& layout = group.group->layout();
    if (!group.group->copies() || group.unsharded > 0) return;
    group.unsharded = blocks_.take(layout.unsharded_bytes);
    now_.unsharded += group.unsharded;
    if (group.group->owner->reshards_after_forward()) to_close_.insert(&group);
    if (!layout.gathers_in_place) {
      group.gather_output = blocks_.take(sent_bytes_of(*group.group) * group.group->axes().shard_ranks());
      now_.unsharded += group.gather_output;
    }
    note(what);
  }

  void finish_gather(Group& group) {
    if (group.gather_output == 0) return;
    now_.unsharded -= group.gather_output;
    blocks_.give_back(std::exchange(group.gather_output, 0));
  }

  void free_unsharded(Group& group) {
    if (group.unsharded == 0) return;
    now_.unsharded -= group.unsharded;
    to_close_.erase(&group);
    blocks_.give_back(std::exchange(group.unsharded, 0));
  }

  void reshard(Group& group) {
    now_.parameters -= std::exchange(group.kept_part, 0);
    free_unsharded(group);
  }

  /// The part among neighbours is a copy, made before the rest is freed.
  void reshard_after_forward(Group& group, const std::string& what) {
    const auto& neighbours = group.group->neighbours();
    if (neighbours && group.unsharded > 0) {
      group.kept_part = group.group->layout().unsharded_bytes / neighbours->size();
      now_.parameters += group.kept_part;
      note(what);
    }
    free_unsharded(group);
  }

  void close_unrelated(const Group& group, const std::string& what) {
    for (auto* other : std::vector(to_close_.begin(), to_close_.end())) {
      const bool is_related = is_above(*other, group) || is_above(group, *other);
      if (!is_related && !other->is_prefetched) reshard_after_forward(*other, what);
    }
  }

  void touch(size_t index, const std::string& what, bool in_backward) {
    auto& group = groups_[index];
    unread_.erase(group.group->number);
    group.is_prefetched = false;
    if (!in_backward) close_unrelated(group, what);
    start_gather(group, what);
    finish_gather(group);
    auto* next = in_backward ? group_at(index - 1) : is_first_ ? next_registered(group) : group_at(index + 1);
    if (next == nullptr) return;
    next->is_prefetched = next->unsharded == 0;
    start_gather(*next, what);
  }

  Group* group_at(size_t index) { return index < groups_.size() ? &groups_[index] : nullptr; }

  /// What the first forward takes for the next one, before it knows.
  Group* next_registered(const Group& group) {
    const auto next = unread_.upper_bound(group.group->number);
    return next == unread_.end() ? nullptr : next->second;
  }

  void forward() {
    for (auto& group : groups_) {
      reshard(group); // written by the optimizer since
      unread_.emplace(group.group->number, &group);
    }
    for (size_t i = 0; i < groups_.size(); ++i) {
      const auto what = "forward of " + groups_[i].group->label();
      touch(i, what, /*in_backward=*/false);
      now_.activations = options_.activation_bytes * static_cast<int64_t>(i + 1) / static_cast<int64_t>(groups_.size());
      note(what);
    }
  }

  void backward() {
    now_.gradients += plain_gradients_;
    for (auto& group : groups_) {
      if (group.is_above_others) fill(group, "backward of " + group.group->label());
    }
    for (size_t left = groups_.size(); left > 0; --left) {
      auto& group = groups_[left - 1];
      const auto what = "backward of " + group.group->label();
      touch(left - 1, what, /*in_backward=*/true);
      fill(group, what);
      now_.temporaries = group.largest_gradient;
      note(what);
      now_.activations = options_.activation_bytes * static_cast<int64_t>(left - 1) / static_cast<int64_t>(groups_.size());
      now_.temporaries = group.last_gradient;
      reduce(group, what); // when all of its gradients are there, and what they were computed from is not
      note(what);
      now_.temporaries = 0;
      if (group.settings->reshard_after_backward) reshard(group);
    }
    finish_reductions("backward of " + groups_.front().group->label());
  }

  void fill(Group& group, const std::string& what) {
    if (group.buffer > 0 || group.reduce_bytes == 0) return;
    const bool is_a_block = group.group->axes().reduce_scatter() != nullptr; // otherwise the gradients stay in it
    if (is_a_block && group.settings->has_only_buffer) finish_reductions(what);
    group.buffer = is_a_block ? blocks_.take(group.reduce_bytes) : group.reduce_bytes;
    now_.reduce_buffers += group.buffer;
  }

  /// Its reduction begins when those before it have ended: all, or all but one where there are two collectives.
  void reduce(Group& group, const std::string& what) {
    if (group.reduce_bytes == 0) return void(now_.gradients += group.reduced_bytes);
    while (!reducing_.empty()) {
      advance(*reducing_.front(), what);
      if (reducing_.front()->group->axes().reduces_twice() && reducing_.size() < 2) break;
      finish(*reducing_.front());
      reducing_.pop_front();
    }
    const auto& axes = group.group->axes();
    if (axes.reduce_scatter()) {
      write_reduced(group, axes.outer_ranks() * group.chunk_bytes);
    } else { // there is no first
      advance(group, what);
    }
    reducing_.push_back(&group);
  }

  void write_reduced(Group& group, int64_t bytes) {
    group.reduced += bytes;
    now_.reduce_buffers += bytes;
  }

  /// The first of its collectives has ended.
  void advance(Group& group, const std::string& what) {
    if (std::exchange(group.has_advanced, true)) return;
    const auto& axes = group.group->axes();
    if (axes.reduce_scatter()) {
      now_.reduce_buffers -= group.buffer;
      blocks_.give_back(std::exchange(group.buffer, 0));
    }
    if (axes.outer_reduce_scatter()) write_reduced(group, group.chunk_bytes);
    note(what);
  }

  void finish(Group& group) {
    now_.reduce_buffers -= std::exchange(group.buffer, 0) + std::exchange(group.reduced, 0);
    now_.gradients += group.reduced_bytes;
    group.has_advanced = false;
  }

  void finish_reductions(const std::string& what) {
    for (auto* group : std::exchange(reducing_, {})) {
      advance(*group, what);
      finish(*group);
    }
  }

  /// LibTorch's Adam makes two tensors of a parameter's shape.
  void optimize() {
    int64_t largest = 0;
    for (const auto& group : groups_) largest = std::max(largest, group.largest_local);
    now_.temporaries = options_.optimizer_tensors >= 2 ? 2 * largest : 0;
    note("optimizer");
    now_.gradients = now_.temporaries = 0; // by `zero_grad`
  }

  ExplainOptions options_;
  int64_t plain_gradients_; // of parameters that no group of the model has
  std::vector<Group> groups_;
  std::set<Group*> to_close_;       // by what another forward closes, of the gathered ones
  std::map<size_t, Group*> unread_; // in this forward, in the order of registration
  Blocks blocks_;
  bool is_first_ = true; // of the model's steps: it knows no order yet
  std::deque<Group*> reducing_;
  MemoryPrediction now_, peak_;
};

} // namespace

int64_t reduce_bytes_of(const ParameterGroup& group) {
  return group.axes().reduces() ? chunk_bytes_of(group) * group.axes().shard_ranks() : 0;
}

MemoryPrediction predict_memory(ShardedModule& root, const ExplainOptions& options, MemoryPrediction known) {
  return Prediction(root, options, std::move(known)).run();
}

} // namespace tessera::internal
