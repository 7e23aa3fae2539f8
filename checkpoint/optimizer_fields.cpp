#include <c10/util/Exception.h>
#include <tessera/checkpoint/optimizer_fields.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <tuple>

namespace tessera {

namespace {

using torch::optim::OptimizerOptions;

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

// Adam and AdamW have the same options, in classes of their own.
template <typename Options>
std::vector<OptionField> adam_options() {
  return {option<Options, double>("lr", &Options::lr), option<Options, std::tuple<double, double>>("betas", &Options::betas),
          option<Options, double>("eps", &Options::eps), option<Options, double>("weight_decay", &Options::weight_decay),
          option<Options, bool>("amsgrad", &Options::amsgrad)};
}

std::vector<OptionField> sgd_options() {
  using Options = torch::optim::SGDOptions;
  return {option<Options, double>("lr", &Options::lr), option<Options, double>("momentum", &Options::momentum),
          option<Options, double>("dampening", &Options::dampening),
          option<Options, double>("weight_decay", &Options::weight_decay), option<Options, bool>("nesterov", &Options::nesterov)};
}

std::vector<OptionField> rmsprop_options() {
  using Options = torch::optim::RMSpropOptions;
  return {option<Options, double>("lr", &Options::lr),
          option<Options, double>("alpha", &Options::alpha),
          option<Options, double>("eps", &Options::eps),
          option<Options, double>("weight_decay", &Options::weight_decay),
          option<Options, double>("momentum", &Options::momentum),
          option<Options, bool>("centered", &Options::centered)};
}

std::vector<OptionField> adagrad_options() {
  using Options = torch::optim::AdagradOptions;
  return {option<Options, double>("lr", &Options::lr), option<Options, double>("lr_decay", &Options::lr_decay),
          option<Options, double>("weight_decay", &Options::weight_decay),
          option<Options, double>("initial_accumulator_value", &Options::initial_accumulator_value),
          option<Options, double>("eps", &Options::eps)};
}

std::vector<OptionField> options_of(const std::string& type) {
  if (type == "Adam") return adam_options<torch::optim::AdamOptions>();
  if (type == "AdamW") return adam_options<torch::optim::AdamWOptions>();
  if (type == "SGD") return sgd_options();
  if (type == "RMSprop") return rmsprop_options();
  TORCH_INTERNAL_ASSERT(type == "Adagrad");
  return adagrad_options();
}

} // namespace

OptimizerFields fields_of(const torch::optim::Optimizer& optimizer) {
  const auto& state = state_fields_of(optimizer);
  return {state, options_of(state.type)};
}

} // namespace tessera
