#include <tessera/optim/optimizer_class.h>
#include <tessera/optim/register_optimizer.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace tessera::internal {

namespace {

namespace optim = torch::optim;

// Adam and AdamW keep the same, in classes of their own.
template <typename Optimizer, typename State, typename Options>
OptimizerClass adam(const std::string& name) {
  return make_optimizer_class<Optimizer, State, Options>(name,
                                                         {{"exp_avg", &State::exp_avg},
                                                          {"exp_avg_sq", &State::exp_avg_sq},
                                                          {"max_exp_avg_sq", &State::max_exp_avg_sq},
                                                          {"step", &State::step}},
                                                         {{"lr", &Options::lr},
                                                          {"betas", &Options::betas},
                                                          {"eps", &Options::eps},
                                                          {"weight_decay", &Options::weight_decay},
                                                          {"amsgrad", &Options::amsgrad}});
}

OptimizerClass sgd() {
  using State = optim::SGDParamState;
  using Options = optim::SGDOptions;
  return make_optimizer_class<optim::SGD, State, Options>("SGD", {{"momentum_buffer", &State::momentum_buffer}},
                                                          {{"lr", &Options::lr},
                                                           {"momentum", &Options::momentum},
                                                           {"dampening", &Options::dampening},
                                                           {"weight_decay", &Options::weight_decay},
                                                           {"nesterov", &Options::nesterov}});
}

OptimizerClass rmsprop() {
  using State = optim::RMSpropParamState;
  using Options = optim::RMSpropOptions;
  return make_optimizer_class<optim::RMSprop, State, Options>("RMSprop",
                                                              {{"square_avg", &State::square_avg},
                                                               {"momentum_buffer", &State::momentum_buffer},
                                                               {"grad_avg", &State::grad_avg},
                                                               {"step", &State::step}},
                                                              {{"lr", &Options::lr},
                                                               {"alpha", &Options::alpha},
                                                               {"eps", &Options::eps},
                                                               {"weight_decay", &Options::weight_decay},
                                                               {"momentum", &Options::momentum},
                                                               {"centered", &Options::centered}});
}

OptimizerClass adagrad() {
  using State = optim::AdagradParamState;
  using Options = optim::AdagradOptions;
  return make_optimizer_class<optim::Adagrad, State, Options>("Adagrad", {{"sum", &State::sum}, {"step", &State::step}},
                                                              {{"lr", &Options::lr},
                                                               {"lr_decay", &Options::lr_decay},
                                                               {"weight_decay", &Options::weight_decay},
                                                               {"initial_accumulator_value", &Options::initial_accumulator_value},
                                                               {"eps", &Options::eps}});
}

// Its `al` is scratch memory of one step.
OptimizerClass lbfgs() {
  using State = optim::LBFGSParamState;
  using Options = optim::LBFGSOptions;
  constexpr auto kReplicated = StateLayout::kReplicated;
  auto made = make_optimizer_class<optim::LBFGS, State, Options>("LBFGS",
                                                                 {{"d", &State::d, kReplicated},
                                                                  {"H_diag", &State::H_diag, kReplicated},
                                                                  {"prev_flat_grad", &State::prev_flat_grad, kReplicated},
                                                                  {"old_dirs", &State::old_dirs, kReplicated},
                                                                  {"old_stps", &State::old_stps, kReplicated},
                                                                  {"ro", &State::ro, kReplicated},
                                                                  {"func_evals", &State::func_evals},
                                                                  {"n_iter", &State::n_iter},
                                                                  {"t", &State::t},
                                                                  {"prev_loss", &State::prev_loss}},
                                                                 {{"lr", &Options::lr},
                                                                  {"max_iter", &Options::max_iter},
                                                                  {"max_eval", &Options::max_eval},
                                                                  {"tolerance_grad", &Options::tolerance_grad},
                                                                  {"tolerance_change", &Options::tolerance_change},
                                                                  {"history_size", &Options::history_size},
                                                                  {"line_search_fn", &Options::line_search_fn}});
  made.flattens_parameters = true;
  return made;
}

} // namespace

std::vector<OptimizerClass> torch_optimizers() {
  return {adam<optim::Adam, optim::AdamParamState, optim::AdamOptions>("Adam"),
          adam<optim::AdamW, optim::AdamWParamState, optim::AdamWOptions>("AdamW"),
          sgd(),
          rmsprop(),
          adagrad(),
          lbfgs()};
}

} // namespace tessera::internal
