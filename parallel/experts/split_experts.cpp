#include <tessera/parallel/experts/split_experts.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/container/modulelist.h>

#include <utility>

#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/parallel/stages/foreign.h>

namespace tessera::internal::experts {

namespace {

/// A parameter's name, in errors.
struct NameOfExperts final : TensorName {
  explicit NameOfExperts(std::string name) : name_(std::move(name)) {}
  std::string to_string() const override { return "the experts' parameter " + name_; }

 private:
  std::string name_;
};

std::string divisors_of(int64_t count) {
  std::string text;
  for (int64_t i = 1; i <= count; ++i) {
    if (count % i == 0) text += c10::str(text.empty() ? "" : ", ", i);
  }
  return text;
}

void check_free(const at::Tensor& parameter, const std::string& name) {
  const auto check = [&](bool holds, const char* problem) {
    TORCH_CHECK_VALUE(holds, "expert_parallel (rank ", process_context().rank(), "): the parameter ", name, problem);
  };
  check(!expert_mark(parameter), " is split over ranks already: call expert_parallel once");
  check(!dtensor_meta(parameter), " is a DTensor already: call expert_parallel before parallelize and fully_shard");
  check(parameter.is_leaf(), " is no leaf: it was computed from other tensors");
  check(!parameter.grad().defined(), " has a gradient already: call zero_grad() before expert_parallel");
}

} // namespace

std::string SplitExperts::full_name(const std::string& parameter) const {
  return name_.empty() ? parameter : name_ + "." + parameter;
}

int64_t SplitExperts::count() const {
  if (const auto* list = module_->as<torch::nn::ModuleListImpl>()) return static_cast<int64_t>(list->size());
  const auto parameters = module_->named_parameters();
  return parameters.is_empty() || parameters[0].value().dim() == 0 ? 0 : parameters[0].value().size(0);
}

void SplitExperts::check() const {
  const auto experts = count();
  TORCH_CHECK_VALUE(experts > 0, "expert_parallel: ", name_.empty() ? "the module " + module_->name() : name_, " has no experts");
  TORCH_CHECK_VALUE(experts % mesh_.size() == 0, "expert_parallel: the ", experts, " experts of ",
                    name_.empty() ? module_->name() : name_, " do not divide among the ", mesh_.size(), " ranks of ",
                    mesh_.to_string(), "; numbers of ranks that do: ", divisors_of(experts));
  const bool is_list = module_->as<torch::nn::ModuleListImpl>() != nullptr;
  for (const auto& item : module_->named_parameters()) {
    check_free(item.value(), full_name(item.key()));
    const bool is_stacked = item.value().dim() > 0 && item.value().size(0) == experts;
    TORCH_CHECK_VALUE(is_list || is_stacked, "expert_parallel: the parameter ", full_name(item.key()), " has the shape ",
                      item.value().sizes(), ", but others are stacked weights of ", experts, " experts");
  }
}

std::string SplitExperts::describe() const {
  std::string text;
  for (const auto& item : module_->named_parameters()) {
    text += c10::str(full_name(item.key()), " ", item.value().scalar_type(), item.value().sizes(),
                     item.value().requires_grad() ? "" : " frozen", "\n");
  }
  return text;
}

void SplitExperts::split(const ExpertMark& mark) {
  if (module_->as<torch::nn::ModuleListImpl>()) return split_list(mark);
  split_stacked(mark);
}

void SplitExperts::split_list(const ExpertMark& mark) {
  auto& list = *module_->as<torch::nn::ModuleListImpl>();
  const auto own = count() / mesh_.size();
  for (int64_t i = 0; i < count(); ++i) {
    const auto name = std::to_string(i);
    auto& expert = *(list.begin() + i)->get();
    const auto owner = i / own;
    if (owner == mesh_.local_rank()) {
      for (const auto& each : expert.parameters()) mark_expert(each, mark);
      continue;
    }
    const auto rank = mesh_.ranks()[static_cast<size_t>(owner)];
    for (const auto& items : {expert.named_parameters(), expert.named_buffers()}) {
      for (const auto& item : items) {
        auto error = c10::str(full_name(name + "." + item.key()), " is read, but expert ", i, " is on rank ", rank,
                              ": dispatch sends tokens there");
        pipeline::make_foreign(item.value(), [text = std::move(error)] { return text; });
      }
    }
    list.unregister_module(name);
  }
}

void SplitExperts::split_stacked(const ExpertMark& mark) {
  const at::NoGradGuard no_grad;
  for (const auto& item : module_->named_parameters()) {
    const auto& tensor = item.value();
    const auto own = tensor.size(0) / mesh_.size();
    const auto local = tensor.detach().narrow(0, mesh_.local_rank() * own, own).clone(at::MemoryFormat::Contiguous);
    auto meta =
        c10::make_intrusive<DTensorMeta>(local, Spec::intern(mesh_, {Shard{0}}, tensor.sizes().vec(), tensor.scalar_type()));
    meta->provenance.name = c10::make_intrusive<NameOfExperts>(full_name(item.key()));
    become_dtensor(tensor, std::move(meta));
    mark_expert(tensor, mark);
  }
}

} // namespace tessera::internal::experts
