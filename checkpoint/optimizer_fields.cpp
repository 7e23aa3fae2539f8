#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <tessera/checkpoint/optimizer_fields.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <tuple>
#include <typeinfo>

namespace tessera {

namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

template <typename State>
TensorField tensor(const char* name, at::Tensor& (State::*access)() noexcept) {
  return {name, [access](OptimizerParamState& state) -> at::Tensor& { return (static_cast<State&>(state).*access)(); }};
}

template <typename State>
auto step(int64_t& (State::*access)() noexcept) {
  return [access](OptimizerParamState& state) -> int64_t& { return (static_cast<State&>(state).*access)(); };
}

StateValue to_value(bool value) { return value; }
StateValue to_value(double value) { return value; }
StateValue to_value(const std::tuple<double, double>& value) {
  return std::vector<double>{std::get<0>(value), std::get<1>(value)};
}

void assign(bool& option, const StateValue& value) { option = std::get<bool>(value); }
void assign(double& option, const StateValue& value) { option = std::get<double>(value); }
void assign(std::tuple<double, double>& option, const StateValue& value) {
  const auto& pair = std::get<std::vector<double>>(value);
  TORCH_CHECK(pair.size() == 2, "optimizer state: an option of two numbers was saved with ", pair.size());
  option = {pair[0], pair[1]};
}

template <typename Options, typename T>
OptionField option(const char* name, T& (Options::*access)() noexcept) {
  return {name,
          // LibTorch's options have no virtual accessors, and the const ones are overloads of the same names.
          [access](const OptimizerOptions& options) {
            auto copy = static_cast<const Options&>(options);
            return to_value((copy.*access)());
          },
          [access](OptimizerOptions& options, const StateValue& value) {
            assign((static_cast<Options&>(options).*access)(), value);
          }};
}

template <typename State>
std::unique_ptr<OptimizerParamState> make() {
  return std::make_unique<State>();
}

// Adam and AdamW keep the same, in classes of their own.
template <typename State, typename Options>
OptimizerFields adam_fields(const char* type) {
  return {type,
          make<State>,
          {tensor<State>("exp_avg", &State::exp_avg), tensor<State>("exp_avg_sq", &State::exp_avg_sq),
           tensor<State>("max_exp_avg_sq", &State::max_exp_avg_sq)},
          step<State>(&State::step),
          {option<Options, double>("lr", &Options::lr), option<Options, std::tuple<double, double>>("betas", &Options::betas),
           option<Options, double>("eps", &Options::eps), option<Options, double>("weight_decay", &Options::weight_decay),
           option<Options, bool>("amsgrad", &Options::amsgrad)}};
}

OptimizerFields sgd_fields() {
  using State = torch::optim::SGDParamState;
  using Options = torch::optim::SGDOptions;
  return {
      "SGD",
      make<State>,
      {tensor<State>("momentum_buffer", &State::momentum_buffer)},
      nullptr,
      {option<Options, double>("lr", &Options::lr), option<Options, double>("momentum", &Options::momentum),
       option<Options, double>("dampening", &Options::dampening), option<Options, double>("weight_decay", &Options::weight_decay),
       option<Options, bool>("nesterov", &Options::nesterov)}};
}

OptimizerFields rmsprop_fields() {
  using State = torch::optim::RMSpropParamState;
  using Options = torch::optim::RMSpropOptions;
  return {"RMSprop",
          make<State>,
          {tensor<State>("square_avg", &State::square_avg), tensor<State>("momentum_buffer", &State::momentum_buffer),
           tensor<State>("grad_avg", &State::grad_avg)},
          step<State>(&State::step),
          {option<Options, double>("lr", &Options::lr), option<Options, double>("alpha", &Options::alpha),
           option<Options, double>("eps", &Options::eps), option<Options, double>("weight_decay", &Options::weight_decay),
           option<Options, double>("momentum", &Options::momentum), option<Options, bool>("centered", &Options::centered)}};
}

OptimizerFields adagrad_fields() {
  using State = torch::optim::AdagradParamState;
  using Options = torch::optim::AdagradOptions;
  return {"Adagrad",
          make<State>,
          {tensor<State>("sum", &State::sum)},
          step<State>(&State::step),
          {option<Options, double>("lr", &Options::lr), option<Options, double>("lr_decay", &Options::lr_decay),
           option<Options, double>("weight_decay", &Options::weight_decay),
           option<Options, double>("initial_accumulator_value", &Options::initial_accumulator_value),
           option<Options, double>("eps", &Options::eps)}};
}

} // namespace

const OptimizerFields& fields_of(const torch::optim::Optimizer& optimizer) {
  static const auto adam = adam_fields<torch::optim::AdamParamState, torch::optim::AdamOptions>("Adam");
  static const auto adamw = adam_fields<torch::optim::AdamWParamState, torch::optim::AdamWOptions>("AdamW");
  static const auto sgd = sgd_fields(), rmsprop = rmsprop_fields(), adagrad = adagrad_fields();
  if (dynamic_cast<const torch::optim::AdamW*>(&optimizer)) return adamw;
  if (dynamic_cast<const torch::optim::Adam*>(&optimizer)) return adam;
  if (dynamic_cast<const torch::optim::SGD*>(&optimizer)) return sgd;
  if (dynamic_cast<const torch::optim::RMSprop*>(&optimizer)) return rmsprop;
  if (dynamic_cast<const torch::optim::Adagrad*>(&optimizer)) return adagrad;
  TORCH_CHECK(false, "state dict: the state of an optimizer of class ", c10::demangle(typeid(optimizer).name()),
              " is not known (Adam, AdamW, SGD, RMSprop and Adagrad are)");
}

} // namespace tessera
