#include <tessera/training/averaged_model.h>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <absl/container/flat_hash_map.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>

#include <tessera/base/listing.h>
#include <tessera/checkpoint/state/model_state.h>
#include <tessera/checkpoint/state/state_copy.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera {

namespace {

using internal::named_tensors;

SpecPtr spec_of(const at::Tensor& tensor) {
  const auto* meta = internal::dtensor_meta(tensor);
  return meta ? meta->spec : nullptr;
}

std::string describe(at::ScalarType dtype, const at::Tensor& average, const SpecPtr& spec) {
  return spec ? spec->to_string() : c10::str(dtype, average.sizes(), ", not sharded");
}

bool is_averaged(const at::Tensor& tensor) { return tensor.is_floating_point() || tensor.is_complex(); }

/// A copy with memory of its own. Neither it nor what it is made of is read as a parameter, which would gather it.
at::Tensor copy_of(const at::Tensor& tensor, at::ScalarType dtype) {
  const auto copy = [dtype](const at::Tensor& plain) {
    return plain.to(plain.options().dtype(dtype).requires_grad(false), /*non_blocking=*/false, /*copy=*/true,
                    at::MemoryFormat::Contiguous);
  };
  const auto* meta = internal::dtensor_meta(tensor);
  if (!meta) return copy(tensor.detach());
  const auto& spec = *meta->spec;
  return internal::make_dtensor(copy(meta->local),
                                Spec::intern(spec.mesh(), spec.placements(), spec.sizes(), dtype, spec.strides()));
}

double checked(double share, int64_t n_averaged) {
  TORCH_CHECK_VALUE(share >= 0 && share <= 1, "AveragedModel: the share of update ", n_averaged + 1, " is ", share,
                    ", but must lie in [0, 1]");
  return share;
}

/// Hands what a load read to the average.
class AverageBinding final : public StateBinding {
 public:
  AverageBinding(std::string name, std::shared_ptr<int64_t> n_averaged)
      : name_(std::move(name)), n_averaged_(std::move(n_averaged)) {}

  void before_load(StateDict& state, const SavedState& saved) override {
    if (state.contains(name_)) state.set(name_, *n_averaged_); // it stays where a load may leave it out
    const auto found = saved.values.find(name_);
    const auto* number = found == saved.values.end() ? nullptr : std::get_if<int64_t>(&found->second);
    TORCH_CHECK(!number || *number >= 0, "the checkpoint's \"", name_, "\" is ", *number, ", but must not be negative");
  }
  void after_load(const StateDict& state) override {
    if (state.contains(name_)) *n_averaged_ = state.value<int64_t>(name_);
  }

 private:
  std::string name_;
  std::shared_ptr<int64_t> n_averaged_;
};

/// The open scopes of all models, in the order in which they were made.
struct OpenScopes {
  std::mutex mutex;
  std::vector<AveragedWeights*> scopes;
};

OpenScopes& open_scopes() {
  static OpenScopes open;
  return open;
}

/// Finds `tensor` among `tensors`; returns their number where it is not there.
size_t position_of(const at::Tensor& tensor, const std::vector<at::Tensor>& tensors) {
  const auto found = std::ranges::find_if(tensors, [&](const at::Tensor& each) { return each.is_same(tensor); });
  return static_cast<size_t>(found - tensors.begin());
}

} // namespace

AverageShare swa() {
  return [](int64_t n_averaged) { return 1 / (static_cast<double>(n_averaged) + 1); };
}

AverageShare ema(double decay, const std::optional<EmaWarmup>& warmup) {
  TORCH_CHECK_VALUE(decay >= 0 && decay <= 1, "ema: the decay is ", decay, ", but must lie in [0, 1]");
  const bool is_valid = !warmup || (warmup->inv_gamma > 0 && warmup->power > 0);
  TORCH_CHECK_VALUE(is_valid, "ema: inv_gamma ", warmup->inv_gamma, " and power ", warmup->power,
                    " of the warm-up must be positive");
  return [decay, warmup](int64_t n_averaged) {
    if (!warmup) return 1 - decay;
    return std::max(1 - decay, std::pow(1 + static_cast<double>(n_averaged) / warmup->inv_gamma, -warmup->power));
  };
}

AveragedModel::AveragedModel(const torch::nn::Module& model, AverageShare share, AverageOptions options)
    : share_(std::move(share)), options_(std::move(options)) {
  TORCH_CHECK_VALUE(share_, "AveragedModel: the share is empty; take ema(decay) or swa()");
  TORCH_CHECK_VALUE(!options_.name.empty(), "AveragedModel: the name is empty");
  TORCH_CHECK_VALUE(!options_.dtype || at::isFloatingType(*options_.dtype), "AveragedModel: the dtype is ", *options_.dtype,
                    ", but must be a floating-point one");
  const c10::InferenceMode no_inference(false); // whose tensors cannot be written later
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor, aliases] :
       named_tensors(model, {.frozen = !options_.ignore_frozen_params, .buffers = options_.use_buffers})) {
    const auto spec = spec_of(tensor);
    TORCH_CHECK_VALUE(!tensor.is_meta() && !(spec && internal::dtensor_meta(tensor)->local.is_meta()), "AveragedModel: ", name,
                      " is on the meta device: call tessera::materialize first, and load the weights");
    TORCH_CHECK_VALUE(!spec || !spec->has_partial(), "AveragedModel: ", name, " is ", spec->to_string(),
                      ", and what ranks have still to reduce cannot be averaged");
    const auto dtype = tensor.scalar_type();
    auto average = copy_of(tensor, options_.dtype && tensor.is_floating_point() ? *options_.dtype : dtype);
    items_.push_back({name, std::move(aliases), std::move(average), dtype, spec});
  }
}

std::vector<at::Tensor> AveragedModel::tensors_of(const torch::nn::Module& model, const char* what) const {
  const auto own = named_tensors(model, {.frozen = !options_.ignore_frozen_params, .buffers = options_.use_buffers});
  absl::flat_hash_map<std::string, const at::Tensor*> by_name;
  for (const auto& [name, tensor, aliases] : own) by_name.emplace(name, &tensor);
  std::vector<std::string> missing, different;
  std::vector<at::Tensor> tensors;
  for (const auto& item : items_) {
    const auto found = by_name.find(item.name);
    if (found == by_name.end()) {
      missing.push_back(item.name);
      continue;
    }
    const auto& tensor = tensors.emplace_back(*found->second);
    by_name.erase(found);
    const auto spec = spec_of(tensor);
    if (spec == item.spec && tensor.scalar_type() == item.dtype && tensor.sizes() == item.average.sizes()) continue;
    different.push_back(c10::str(item.name, ": ", describe(tensor.scalar_type(), tensor, spec), "; the average was made of ",
                                 describe(item.dtype, item.average, item.spec)));
  }
  std::vector<std::string> unexpected;
  for (const auto& [name, tensor] : by_name) unexpected.push_back(name);
  std::sort(unexpected.begin(), unexpected.end());
  std::string problems;
  if (!missing.empty()) problems += "\nonly in the average:" + internal::listing(missing);
  if (!unexpected.empty()) problems += "\nonly in the model:" + internal::listing(unexpected);
  if (!different.empty()) problems += "\ndifferent in the model:" + internal::listing(different);
  TORCH_CHECK_VALUE(problems.empty(), what, ": this is not the model that the average was made of, on rank ",
                    internal::rank_for_errors(), ":", problems,
                    "\nMake the average after fully_shard, and a new one for a model with another layout: it takes the state of "
                    "the old one through load_state_dict or a checkpoint");
  return tensors;
}

void AveragedModel::update_parameters(const torch::nn::Module& model) {
  const at::NoGradGuard no_grad;
  const auto tensors = tensors_of(model, "update_parameters");
  TORCH_CHECK(!AveragedWeights::hold_any(tensors),
              "update_parameters: the model holds an average now; let its AveragedWeights end first");
  const auto n = *n_averaged_;
  const double share = n == 0 ? 1 : checked(share_(n), n);
  for (size_t i = 0; i < items_.size(); ++i) {
    const auto& average = items_[i].average;
    if (n == 0 || !is_averaged(average)) {
      average.copy_(tensors[i]);
    } else {
      average.lerp_(average.scalar_type() == items_[i].dtype ? tensors[i] : copy_of(tensors[i], average.scalar_type()), share);
    }
  }
  ++*n_averaged_;
}

void AveragedModel::copy_to(const torch::nn::Module& model) const {
  const at::NoGradGuard no_grad;
  const auto tensors = tensors_of(model, "copy_to");
  for (size_t i = 0; i < items_.size(); ++i) tensors[i].copy_(items_[i].average);
}

AveragedWeights::AveragedWeights(const AveragedModel& average, const torch::nn::Module& model) {
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  tensors_ = average.tensors_of(model, "AveragedWeights");
  for (const auto& tensor : tensors_) kept_.push_back(copy_of(tensor, tensor.scalar_type()));
  {
    auto& open = open_scopes();
    const std::lock_guard lock(open.mutex);
    open.scopes.push_back(this);
  }
  try {
    average.copy_to(model);
  } catch (...) { // half of it may be written
    restore();
    throw;
  }
}

AveragedWeights::~AveragedWeights() {
  try {
    restore();
  } catch (...) { // NOLINT(bugprone-empty-catch): `restore` is there for those who want the error
  }
}

bool AveragedWeights::hold_any(const std::vector<at::Tensor>& tensors) {
  auto& open = open_scopes();
  const std::lock_guard lock(open.mutex);
  return std::ranges::any_of(open.scopes, [&](const AveragedWeights* scope) {
    return std::ranges::any_of(tensors,
                               [&](const auto& tensor) { return position_of(tensor, scope->tensors_) < scope->tensors_.size(); });
  });
}

void AveragedWeights::close() {
  auto& open = open_scopes();
  const std::lock_guard lock(open.mutex);
  auto next = std::ranges::find(open.scopes, this);
  if (next == open.scopes.end()) return;
  next = open.scopes.erase(next);
  for (; next != open.scopes.end(); ++next) {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (!kept_[i].defined()) continue; // an earlier one took it
      const auto position = position_of(tensors_[i], (*next)->tensors_);
      if (position < (*next)->tensors_.size()) (*next)->kept_[position] = std::move(kept_[i]);
    }
  }
}

void AveragedWeights::restore() {
  close();
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (kept_[i].defined()) tensors_[i].copy_(kept_[i]);
  }
  tensors_.clear();
  kept_.clear();
}

StateDict state_dict(const AveragedModel& average, const StateDictOptions& options) {
  return internal::read_with_options(options, [&] {
    const auto& name = average.options_.name;
    const auto full_name = [&](const std::string& own) { return name + "." + options.prefix + own; };
    StateDict state;
    for (const auto& item : average.items_) {
      std::vector<std::string> aliases;
      for (const auto& alias : item.aliases) aliases.push_back(full_name(alias));
      state.add(full_name(item.name), item.average, std::move(aliases));
    }
    const auto number = name + ".n_averaged";
    state.set(number, average.n_averaged());
    state.bind(std::make_shared<AverageBinding>(number, average.n_averaged_));
    return state;
  });
}

} // namespace tessera
