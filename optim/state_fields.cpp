#include <tessera/optim/state_fields.h>

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <typeinfo>

namespace tessera {

namespace {

using torch::optim::OptimizerParamState;

template <typename State>
TensorField tensor(const char* name, at::Tensor& (State::*access)() noexcept) {
  return {name, [access](OptimizerParamState& state) -> at::Tensor& { return (static_cast<State&>(state).*access)(); }};
}

template <typename State>
auto step(int64_t& (State::*access)() noexcept) {
  return [access](OptimizerParamState& state) -> int64_t& { return (static_cast<State&>(state).*access)(); };
}

template <typename State>
std::unique_ptr<OptimizerParamState> make() {
  return std::make_unique<State>();
}

// Adam and AdamW keep the same, in classes of their own.
template <typename State>
StateFields adam_fields(const char* type) {
  return {type,
          make<State>,
          {tensor<State>("exp_avg", &State::exp_avg), tensor<State>("exp_avg_sq", &State::exp_avg_sq),
           tensor<State>("max_exp_avg_sq", &State::max_exp_avg_sq)},
          step<State>(&State::step)};
}

StateFields sgd_fields() {
  using State = torch::optim::SGDParamState;
  return {"SGD", make<State>, {tensor<State>("momentum_buffer", &State::momentum_buffer)}, nullptr};
}

StateFields rmsprop_fields() {
  using State = torch::optim::RMSpropParamState;
  return {"RMSprop",
          make<State>,
          {tensor<State>("square_avg", &State::square_avg), tensor<State>("momentum_buffer", &State::momentum_buffer),
           tensor<State>("grad_avg", &State::grad_avg)},
          step<State>(&State::step)};
}

StateFields adagrad_fields() {
  using State = torch::optim::AdagradParamState;
  return {"Adagrad", make<State>, {tensor<State>("sum", &State::sum)}, step<State>(&State::step)};
}

} // namespace

const StateFields& state_fields_of(const torch::optim::Optimizer& optimizer) {
  static const auto adam = adam_fields<torch::optim::AdamParamState>("Adam");
  static const auto adamw = adam_fields<torch::optim::AdamWParamState>("AdamW");
  static const auto sgd = sgd_fields(), rmsprop = rmsprop_fields(), adagrad = adagrad_fields();
  if (dynamic_cast<const torch::optim::AdamW*>(&optimizer)) return adamw;
  if (dynamic_cast<const torch::optim::Adam*>(&optimizer)) return adam;
  if (dynamic_cast<const torch::optim::SGD*>(&optimizer)) return sgd;
  if (dynamic_cast<const torch::optim::RMSprop*>(&optimizer)) return rmsprop;
  if (dynamic_cast<const torch::optim::Adagrad*>(&optimizer)) return adagrad;
  TORCH_CHECK(false, "the state of an optimizer of class ", c10::demangle(typeid(optimizer).name()),
              " is not known (Adam, AdamW, SGD, RMSprop and Adagrad are)");
}

} // namespace tessera
