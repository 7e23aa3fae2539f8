#include <tessera/activations/recomputation.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include <tessera/activations/keep_brought_back.h>
#include <tessera/activations/open_runs.h>
#include <tessera/activations/placed_tensors.h>
#include <tessera/activations/written_buffers.h>
#include <tessera/collectives/process_context.h>

namespace tessera::internal {

namespace {

using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;

std::atomic<uint64_t> last_number = 0;

class FirstRunHooks final : public SavedVariableHooks {
 public:
  explicit FirstRunHooks(std::shared_ptr<Recomputation> recomputation) : recomputation_(std::move(recomputation)) {}
  void call_pack_hook(const at::Tensor& tensor) override { slot_ = recomputation_->add(tensor); }
  at::Tensor call_unpack_hook() override {
    if (kept_.defined()) return std::exchange(kept_, at::Tensor());
    auto value = recomputation_->bring_back(*slot_);
    if (open_runs->keeps_brought_back) kept_ = value.detach(); // the second run's graph has no further use
    return value;
  }

 private:
  std::shared_ptr<Recomputation> recomputation_;
  std::shared_ptr<Recomputation::Slot> slot_;
  at::Tensor kept_; ///< for the next backward (KeepBroughtBack)
};

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> copies;
  copies.reserve(tensors.size());
  for (const auto& each : tensors) copies.push_back(each.clone());
  return copies;
}

/// Gives the tensors the values of their copies. They get no new version, so that autograd takes what it saved of them.
void set_values(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& copies) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].variable_data().copy_(copies[i]);
}

c10::VariableVersion version_of(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->version_counter(); }

/// Ends a second run from inside. No std::exception, which the function might catch.
struct EarlyStop {
  const void* run;
};

} // namespace

KeepBroughtBack::KeepBroughtBack() : keeps_(open_runs->keeps_brought_back, true) {}

uint64_t current_recomputation() { return open_runs->second.outermost; }

bool in_second_run() {
  const auto& second = open_runs->second;
  return second.outermost > 0 && second.task == torch::autograd::get_current_graph_task_id();
}

RunScope::RunScope(uint64_t outermost, bool is_second_run)
    : outermost_(open_runs->outermost, outermost),
      second_(open_runs->second,
              is_second_run ? OpenRuns::Second{outermost, torch::autograd::get_current_graph_task_id()} : open_runs->second) {}

Recomputation::Signature::Signature(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  sizes = tensor.sizes().vec();
  dtype = tensor.scalar_type();
  device = tensor.device();
}

std::string Recomputation::Signature::to_string() const {
  return dtype ? c10::str(*dtype, " ", c10::IntArrayRef(sizes), " on ", *device) : "undefined";
}

Recomputation::Recomputation(RecomputeOptions options, const Tensors& inputs, const torch::nn::Module* module, Run run)
    : options_(std::move(options)),
      outermost_(open_runs->outermost > 0 ? open_runs->outermost : ++last_number),
      run_(std::move(run)),
      rng_(inputs) {
  if (module) {
    if (options_.name.empty()) options_.name = module->name();
    for (const auto& item : module->named_buffers()) {
      if (!item.value().has_storage()) continue;
      buffers_.push_back(item.value());
      buffer_names_.push_back(item.key());
      buffer_watches_.emplace_back(item.value());
    }
    first_values_ = copies_of(buffers_);
    for (const auto& item : module->named_parameters())
      watched_.emplace_back("parameter " + item.key(), VersionWatch(item.value()));
  }
  std::optional<PlacedTensors> placed;
  if (options_.place) placed.emplace(options_.place);
  inputs_.reserve(inputs.size());
  for (const auto& each : inputs) inputs_.emplace_back(each, /*is_output=*/false);
  if (options_.keep) results_.emplace(options_.keep, options_.place);
}

Recomputation::FirstRun::FirstRun(Recomputation& recomputation)
    : recomputation_(recomputation),
      run_(recomputation.outermost_, /*is_second_run=*/false),
      taker_(this),
      results_(recomputation.results_ ? &*recomputation.results_ : nullptr, taker_),
      decisions_(recomputation.decisions_, DecisionScope::Run::kFirst) {}

std::unique_ptr<SavedVariableHooks> Recomputation::FirstRun::take() {
  return std::make_unique<FirstRunHooks>(recomputation_.shared_from_this());
}

void Recomputation::FirstRun::finish(const Tensors& outputs) {
  auto& made = recomputation_;
  if (!made.options_.keep_rng_state) {
    TORCH_CHECK(made.rng_.now() == made.rng_, made.describe(),
                " drew random numbers, and its second run would draw others: set keep_rng_state");
    made.rng_ = {};
  }
  made.look_at_tensors();
  made.keep_written_buffers();
  made.is_over_ = true;
  if (made.options_.early_stop) return;
  for (const auto& each : outputs) made.outputs_.emplace_back(each);
}

/// Hands what autograd saves to the slots of the first run, in the same order.
class Recomputation::SecondRun final : public SavedTensorTaker {
 public:
  SecondRun(Recomputation& made, KeptResults::Values kept, Slot& wanted, int64_t task);
  void run(const Tensors& inputs);
  /// After the run, however it ended. Its writes to buffers are none that others see.
  void restore() const;
  std::unique_ptr<SavedVariableHooks> take() override;
  /// The values of `saved`.
  at::Tensor give(const at::Tensor& saved);

 private:
  class Hooks;
  /// A backward inside the function may ask amid the first run, which has come this far alone.
  bool may_stop_early() const { return made_.options_.early_stop || !made_.is_over_; }
  bool stops_early() const { return may_stop_early() && next_ >= needed_; }
  void check_to_the_end(const Tensors& outputs) const;

  Recomputation& made_;
  Slot& wanted_;
  int64_t task_;
  size_t needed_ = 0; // slots, up to the last one that backward may ask for
  size_t next_ = 0;
  RngState rng_before_;
  Tensors buffers_before_;
  std::vector<std::pair<c10::VariableVersion, uint32_t>> versions_before_; // of all buffers of the module
  AutocastScope autocast_;
  ScopedValue<CarriedScopePtr> scope_;
  at::AutoGradMode grad_mode_{true};
  RunScope run_;
  TakerScope taker_{this};
  KeptResults::Scope results_;
  DecisionScope decisions_;
};

class Recomputation::SecondRun::Hooks final : public SavedVariableHooks {
 public:
  explicit Hooks(SecondRun& run) : run_(run) {}
  void call_pack_hook(const at::Tensor& tensor) override { values_ = run_.give(tensor); }
  at::Tensor call_unpack_hook() override { return values_; } // of a backward inside of the function

 private:
  SecondRun& run_;
  at::Tensor values_;
};

Recomputation::SecondRun::SecondRun(Recomputation& made, KeptResults::Values kept, Slot& wanted, int64_t task)
    : made_(made),
      wanted_(wanted),
      task_(task),
      rng_before_(made.rng_.now()),
      buffers_before_(copies_of(made.buffers_)),
      autocast_(made.autocast_),
      scope_(open_runs->carried, made.scope_),
      run_(made.outermost_, /*is_second_run=*/true),
      results_(made.results_ ? &*made.results_ : nullptr, std::move(kept)),
      decisions_(made.decisions_, DecisionScope::Run::kSecond) {
  for (const auto* buffers : {&made_.buffers_, &made_.unwritten_buffers_}) {
    for (const auto& each : *buffers) {
      if (version_of(each).enabled()) versions_before_.emplace_back(version_of(each), version_of(each).current_version());
    }
  }
  made_.rng_.restore();
  set_values(made_.buffers_, made_.first_values_);
  for (size_t i = 0; i < made_.slots_.size(); ++i) {
    if (!made_.slots_[i].expired()) needed_ = i + 1;
  }
}

void Recomputation::SecondRun::restore() const {
  rng_before_.restore();
  set_values(made_.buffers_, buffers_before_);
  std::vector<std::shared_ptr<Slot>> given;
  for (const auto& each : made_.slots_) {
    const auto slot = each.lock();
    if (!slot || !slot->value.defined()) continue;
    slot->is_overwritten = slot->is_overwritten || slot->value_watch->has_changed();
    given.push_back(slot);
  }
  for (auto [version, before] : versions_before_) version.set_version(before);
  for (const auto& slot : given) slot->value_watch->look();
}

std::unique_ptr<SavedVariableHooks> Recomputation::SecondRun::take() { return std::make_unique<Hooks>(*this); }

at::Tensor Recomputation::SecondRun::give(const at::Tensor& saved) {
  // The values come without the graph, which is thrown away. A write to it in the rest of the run is seen, as autograd sees it.
  const auto* impl = saved.unsafeGetTensorImpl();
  at::Tensor values(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
  if (stops_early()) return values; // the function caught the end
  if (next_ >= made_.slots_.size())
    made_.fail(c10::str("autograd saved ", made_.slots_.size(), " tensors then, and saves more now"));
  if (const auto slot = made_.slots_[next_++].lock()) {
    const Signature now(values);
    if (!(now == slot->signature)) {
      made_.fail(c10::str("saved tensor ", slot->number + 1, " of ", made_.slots_.size(), " was ", slot->signature.to_string(),
                          ", and is ", now.to_string(), " now"));
    }
    const bool is_wanted = slot.get() == &wanted_;
    if (is_wanted || (task_ >= 0 && slot->taken_by != task_)) {
      slot->value = values;
      slot->value_watch.emplace(values);
      slot->is_overwritten = false;
      slot->task = task_;
    }
  }
  if (stops_early()) throw EarlyStop{this};
  return values;
}

void Recomputation::SecondRun::run(const Tensors& inputs) {
  try {
    check_to_the_end(made_.run_(inputs));
  } catch (const EarlyStop& stop) {
    if (stop.run != this) throw;
  }
}

void Recomputation::SecondRun::check_to_the_end(const Tensors& outputs) const {
  const auto expected = may_stop_early() ? needed_ : made_.slots_.size();
  if (next_ < expected) made_.fail(c10::str("autograd saved ", made_.slots_.size(), " tensors then, and only ", next_, " now"));
  if (may_stop_early()) return;
  if (outputs.size() != made_.outputs_.size())
    made_.fail(c10::str("it returned ", made_.outputs_.size(), " tensors then, and returns ", outputs.size(), " now"));
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Signature now(outputs[i]);
    if (now == made_.outputs_[i]) continue;
    made_.fail(c10::str("output ", i + 1, " was ", made_.outputs_[i].to_string(), ", and is ", now.to_string(), " now"));
  }
}

/// Of the buffers that the function did not write no copy is kept: a write to one is an error.
void Recomputation::keep_written_buffers() {
  const auto buffers = std::exchange(buffers_, {}), before = std::exchange(first_values_, {});
  const auto names = std::exchange(buffer_names_, {});
  const auto watches = std::exchange(buffer_watches_, {});
  const auto written = were_written(buffers, before, watches);
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (written[i]) {
      buffers_.push_back(buffers[i]);
      first_values_.push_back(before[i]);
    } else {
      watched_.emplace_back("buffer " + names[i], watches[i]);
      unwritten_buffers_.push_back(buffers[i]);
    }
  }
}

std::shared_ptr<Recomputation::Slot> Recomputation::add(const at::Tensor& saved) {
  auto slot = std::make_shared<Slot>(Slot{.number = slots_.size(), .signature = Signature(saved), .watch = VersionWatch(saved)});
  slots_.push_back(slot);
  return slot;
}

at::Tensor Recomputation::bring_back(Slot& slot) {
  const std::lock_guard lock(mutex_);
  const int64_t task = torch::autograd::get_current_graph_task_id();
  if (!slot.value.defined() || slot.task != task) run_again(slot, task);
  slot.taken_by = task;
  TORCH_CHECK(!slot.is_overwritten && !slot.value_watch->has_changed(), describe(), ": saved tensor ", slot.number + 1, " (",
              slot.signature.to_string(), "), which backward needs, was modified by an inplace operation later in the function");
  return std::exchange(slot.value, at::Tensor());
}

void Recomputation::run_again(Slot& wanted, int64_t task) {
  try {
    check_unchanged();
    const auto inputs = unpack_inputs(); // which may run a function around this one again
    // What the function's own backwards bring back is not kept.
    const ScopedValue keeps_nothing(open_runs->keeps_brought_back, false);
    SecondRun second(*this, results_ ? results_->values() : KeptResults::Values(), wanted, task);
    try {
      second.run(inputs);
    } catch (...) {
      second.restore();
      throw;
    }
    second.restore();
    look_at_tensors(); // what the function writes each time
  } catch (c10::Error& error) {
    forget(task);
    error.add_context("in the second run of " + describe());
    throw;
  } catch (...) {
    forget(task);
    throw;
  }
  if (task < 0) return;
  // What backward has no use for, as where it computes the gradients of some inputs alone, goes with it.
  Engine::get_default_engine().queue_callback([weak = weak_from_this(), task] {
    if (const auto self = weak.lock()) self->forget(task);
  });
}

Recomputation::Tensors Recomputation::unpack_inputs() const {
  Tensors inputs;
  inputs.reserve(inputs_.size());
  for (const auto& each : inputs_) {
    auto input = each.unpack();
    const bool is_computed = input.defined() && !input.is_leaf();
    inputs.push_back(is_computed ? input.detach().requires_grad_(input.requires_grad()) : input);
  }
  return inputs;
}

void Recomputation::look_at_tensors() {
  for (const auto& each : slots_) {
    if (const auto slot = each.lock()) slot->watch.look();
  }
  for (auto& [name, watch] : watched_) watch.look();
}

void Recomputation::check_unchanged() const {
  constexpr auto kWhat = " was modified by an inplace operation since the forward, and the second run would compute other values";
  for (const auto& [name, watch] : watched_) TORCH_CHECK(!watch.has_changed(), "the ", name, kWhat);
  for (const auto& each : slots_) {
    const auto slot = each.lock();
    TORCH_CHECK(!slot || !slot->watch.has_changed(), "a tensor that autograd saved (", slot->signature.to_string(), ")", kWhat);
  }
}

void Recomputation::forget(int64_t task) {
  const std::lock_guard lock(mutex_);
  for (const auto& each : slots_) {
    const auto slot = each.lock();
    if (slot && slot->task == task) slot->value = at::Tensor();
  }
}

std::string Recomputation::describe() const { return "recompute of " + options_.name; }

void Recomputation::fail(const std::string& how) const {
  TORCH_CHECK(
      false, describe(), ": its second run differs from the first on rank ", rank_for_errors(), ": ", how,
      ". A function that is recomputed must do the same both times: it may depend on its inputs and on what does not change "
      "between forward and backward");
}

} // namespace tessera::internal
