#pragma once

#include <torch/optim/optimizer.h>

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include <tessera/optim/field_value.h>
#include <tessera/optim/optimizer_class.h>
#include <tessera/optim/state_layout.h>

namespace tessera {

namespace internal {

template <typename Base, typename Owner>
concept BaseOf = std::derived_from<Owner, Base>;

template <typename Accessor, typename Owner>
concept AccessorOf = std::is_lvalue_reference_v<std::invoke_result_t<const Accessor&, Owner&>>;

// The class of LibTorch's that the registered functions take.
template <typename Owner>
using HolderOf =
    std::conditional_t<std::derived_from<Owner, torch::optim::OptimizerParamState>, torch::optim::OptimizerParamState,
                       std::conditional_t<std::derived_from<Owner, torch::optim::OptimizerOptions>,
                                          torch::optim::OptimizerOptions, torch::optim::Optimizer>>;

template <typename Owner, typename Accessor, typename Holder>
auto& read_field(const Accessor& accessor, Holder& holder) {
  auto* owner = dynamic_cast<Owner*>(&holder);
  if (!owner) throw_other_class(typeid(holder), typeid(Owner));
  return std::invoke(accessor, *owner);
}

template <typename Owner, typename Accessor, typename Holder = HolderOf<Owner>>
std::variant<TensorField, ValueField<Holder>> make_field(std::string name, Accessor accessor, StateLayout layout) {
  using Field = std::remove_reference_t<std::invoke_result_t<const Accessor&, Owner&>>;
  if constexpr (kIsTensor<Field>) {
    static_assert(std::derived_from<Owner, torch::optim::OptimizerParamState>, "tensors belong to the state of a parameter");
    return TensorField{
        std::move(name), layout, kIsTensorList<Field>,
        [accessor](Holder& state) { return tensors_of(read_field<Owner>(accessor, state)); },
        [accessor](Holder& state, const auto& tensors) { assign_tensors(read_field<Owner>(accessor, state), tensors); }};
  } else {
    return ValueField<Holder>{
        std::move(name), [accessor](Holder& holder) { return to_value(read_field<Owner>(accessor, holder)); },
        [accessor](Holder& holder, const StateValue& value) { assign_value(read_field<Owner>(accessor, holder), value); }};
  }
}

} // namespace internal

/// A member of `Owner` (the state that an optimizer keeps for a parameter, the options of a group, or the optimizer) under the
/// name that it has in a state dict:
///   {"exp_avg", &LionState::exp_avg}                               a data member, or the accessor that TORCH_ARG makes
///   {"step", [](LionState& state) -> auto& { return state.a.b; }}  anything that returns a reference to it
///
/// It is a tensor, an optional one or a list (std::vector, std::deque), in the state of a parameter alone; or a number, bool,
/// enum or std::string, or a std::optional, tuple, pair, array, vector or deque of these. A member that `Owner` does not have,
/// and one of another type, are errors of the compiler. `layout` counts for tensors.
template <typename Owner>
class OptimizerField {
 public:
  template <typename T, internal::BaseOf<Owner> Base>
  OptimizerField(std::string name, T& (Base::*accessor)(), StateLayout layout = StateLayout::kAsParameter)
      : OptimizerField(
            std::move(name), [accessor](Owner& owner) -> T& { return (owner.*accessor)(); }, layout) {}

  template <internal::AccessorOf<Owner> Accessor>
  OptimizerField(std::string name, Accessor accessor, StateLayout layout = StateLayout::kAsParameter)
      : field_(internal::make_field<Owner>(std::move(name), std::move(accessor), layout)) {}

  const std::variant<internal::TensorField, internal::ValueField<internal::HolderOf<Owner>>>& internal() const { return field_; }

 private:
  std::variant<internal::TensorField, internal::ValueField<internal::HolderOf<Owner>>> field_;
};

namespace internal {

template <typename Owner>
std::vector<ValueField<HolderOf<Owner>>> values_of(const std::vector<OptimizerField<Owner>>& fields) {
  std::vector<ValueField<HolderOf<Owner>>> values;
  for (const auto& field : fields) {
    if (const auto* value = std::get_if<ValueField<HolderOf<Owner>>>(&field.internal())) values.push_back(*value);
  }
  return values;
}

template <typename Optimizer, typename State, typename Options>
OptimizerClass make_optimizer_class(std::string name, const std::vector<OptimizerField<State>>& state,
                                    const std::vector<OptimizerField<Options>>& options,
                                    const std::vector<OptimizerField<Optimizer>>& own = {}) {
  OptimizerClass made{
      std::move(name),
      typeid(Optimizer),
      [](const torch::optim::Optimizer& optimizer) { return dynamic_cast<const Optimizer*>(&optimizer) != nullptr; },
      [] { return std::make_unique<State>(); },
      {},
      values_of(state),
      values_of(options),
      values_of(own)};
  for (const auto& field : state) {
    if (const auto* tensor = std::get_if<TensorField>(&field.internal())) made.tensors.push_back(*tensor);
  }
  return made;
}

} // namespace internal

/// Describes the state of optimizers of class `Optimizer`. `state_dict`, `load_state_dict`, `shard_optimizer`, `checkpoint::save`
/// and `load` then handle them like LibTorch's own, which need no registration (Adam, AdamW, SGD, RMSprop, Adagrad, LBFGS):
///
///   register_optimizer<Lion, LionState, LionOptions>(
///       "Lion", {{"exp_avg", &LionState::exp_avg}}, {{"lr", &LionOptions::lr}, {"betas", &LionOptions::betas}});
///
/// `State` is the class of the objects in `optimizer.state()`, keyed by `parameter.unsafeGetTensorImpl()` as LibTorch's
/// optimizers do it; a load makes new ones with its default constructor. `Options` is the class of `param_groups()[i].options()`.
/// `own` are values of the optimizer object itself, such as a count of steps. Fields that are not listed are not saved, and a
/// load does not change them. `name` is saved as the optimizer's type: a load into another type is an error.
///
/// Call it once in every process, before the first use. Local. It applies to this class and to those that derive from it and are
/// not registered themselves. Errors: a class or name that is registered already; a field's name that
/// appears twice, is empty, holds a dot, or is one of a state dict's own ("params", "type", …). Later, with the first state dict:
/// states or options that are not of the registered class.
template <std::derived_from<torch::optim::Optimizer> Optimizer, std::derived_from<torch::optim::OptimizerParamState> State,
          std::derived_from<torch::optim::OptimizerOptions> Options>
void register_optimizer(const std::string& name, const std::vector<OptimizerField<State>>& state,
                        const std::vector<OptimizerField<Options>>& options,
                        const std::vector<OptimizerField<Optimizer>>& own = {}) {
  static_assert(std::default_initializable<State>, "a load makes states with their default constructor");
  internal::add_optimizer_class(internal::make_optimizer_class<Optimizer>(name, state, options, own));
}

} // namespace tessera
