// Steps that compute the loss themselves.
#include <tessera/checkpoint/state_dict.h>
#include <tessera/collectives/process_context.h>
#include <tessera/optim/step.h>
#include <tessera/training/metrics.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>

namespace tessera::testing::scripts {
namespace {

void step_with_a_closure(Turn& turn) {
  auto& optimizer = *turn.trainee.optimizer;
  const bool by_function = turn.draw.chance(50);
  const auto closure = [&] {
    optimizer.zero_grad();
    auto loss = random_loss(turn, {}, /*may_recompute=*/true);
    backward(loss);
    return loss.detach();
  };
  turn.side.record_mean(by_function ? tessera::step(optimizer, closure) : optimizer.step(closure));
}

/// What LBFGS may train: it has one vector for all of it.
std::vector<Tensor> parameters_for_lbfgs(const RandomModel& model) {
  auto parameters = distinct(model.parameters());
  std::erase_if(parameters, [](const Tensor& each) { return !each.requires_grad() || each.scalar_type() != torch::kDouble; });
  return parameters;
}

/// Short steps, and few: more of them amplify the rounding of a sum over ranks.
torch::optim::LBFGSOptions random_lbfgs(Draw& draw) {
  torch::optim::LBFGSOptions options(0.1);
  options.max_iter(2).history_size(2);
  if (draw.chance(30)) options.line_search_fn("strong_wolfe");
  return options;
}

/// Some steps by LBFGS, on other rows each, with what it remembers taken back in between. Its line of steps would amplify what is
/// rounded to float.
class Minimization {
 public:
  explicit Minimization(Draw& draw)
      : options_(random_lbfgs(draw)),
        seed_(draw.seed()),
        steps_(static_cast<uint64_t>(1 + draw.below(2))),
        goes_back_at_(static_cast<uint64_t>(draw.below(4))),
        squares_(draw.chance(75) ? Squares::kBounded : Squares::kAsTheyAre) {} // a step that goes too far ends no script

  void run(Side& side, Trainee& trainee) const {
    torch::optim::LBFGS optimizer(parameters_for_lbfgs(*trainee.model), options_);
    const auto mesh = init_device_mesh(test_device_type(), {process_context().world_size()});
    StateDict before;
    for (uint64_t step = 0; step < steps_; ++step) {
      if (step == goes_back_at_) before = state_dict(*trainee.model, optimizer, {.cpu_offload = true});
      side.record(optimizer.step([&] {
        optimizer.zero_grad();
        const auto loss = whole_loss(side, trainee, seed_ + step, squares_);
        backward(loss);
        return side.sharded ? all_reduce(loss.detach(), mesh, ReduceOp::kAvg) : loss.detach();
      }));
      if (step == goes_back_at_) load_state_dict(*trainee.model, optimizer, before);
    }
  }

 private:
  torch::optim::LBFGSOptions options_;
  uint64_t seed_, steps_, goes_back_at_;
  Squares squares_;
};

/// Makes each weight up to a few roundings larger or smaller, as a sum over ranks makes a gradient.
void nudge(const RandomModel& model, uint64_t seed) {
  constexpr double kNudge = 1e-15;
  auto generator = at::detail::createCPUGenerator(seed);
  for (const auto& weight : distinct(model.parameters())) {
    const auto factors = 2 * torch::rand(weight.sizes(), generator, torch::kDouble) - 1;
    weight.data().add_(weight.detach() * factors, kNudge);
  }
}

/// An unsharded model as that of `trainee` is now; with a seed, its weights are nudged.
Trainee twin_of(const Trainee& trainee, std::optional<uint64_t> seed) {
  const torch::NoGradGuard no_grad;
  Trainee twin{trainee.build, trainee.build(), {}, trainee.plan, nullptr, {}, {}};
  const auto from = trainee.model->parameters(), to = twin.model->parameters();
  for (size_t i = 0; i < from.size(); ++i) {
    to[i].data().copy_(from[i]);
    to[i].set_requires_grad(from[i].requires_grad());
  }
  if (seed) nudge(*twin.model, *seed);
  const auto buffers = trainee.model->buffers(), own_buffers = twin.model->buffers();
  for (size_t i = 0; i < buffers.size(); ++i) own_buffers[i].copy_(buffers[i]);
  const auto modules = trainee.model->modules(), own_modules = twin.model->modules();
  for (size_t i = 0; i < modules.size(); ++i) own_modules[i]->train(modules[i]->is_training());
  return twin;
}

/// What a script compares, after such a training of an unsharded model whose weights were nudged if there is a seed.
std::vector<Tensor> numbers_after(const Minimization& minimization, const Trainee& trainee, std::optional<uint64_t> seed) {
  Side side(/*is_sharded=*/false, {});
  auto twin = twin_of(trainee, seed);
  minimization.run(side, twin);
  auto numbers = twin.model->parameters();
  for (const auto& parameter : twin.model->parameters()) numbers.push_back(parameter.grad());
  for (const auto& each : side.recorded) numbers.push_back(torch::full({1}, each.value));
  return numbers;
}

double largest_difference(const std::vector<Tensor>& numbers, const std::vector<Tensor>& others) {
  const torch::NoGradGuard no_grad;
  double largest = 0;
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (!numbers[i].defined() || numbers[i].numel() == 0) continue;
    const auto difference = ((numbers[i] - others[i]).abs() / (1 + numbers[i].abs())).max().item<double>();
    if (std::isnan(difference)) return std::numeric_limits<double>::infinity();
    largest = std::max(largest, difference);
  }
  return largest;
}

/// How far such a training takes unsharded models apart whose weights were a few roundings apart. A line search that decides
/// otherwise takes them far apart, one time in a hundred.
double parting_of_twins(const Minimization& minimization, const Trainee& trainee) {
  const auto numbers = numbers_after(minimization, trainee, std::nullopt);
  double parting = 0;
  for (const uint64_t seed : {1, 2})
    parting = std::max(parting, largest_difference(numbers, numbers_after(minimization, trainee, seed)));
  return parting;
}

void minimize(Turn& turn) {
  auto& trainee = turn.trainee;
  const Minimization minimization(turn.draw);
  if (!trainee.is_exact || parameters_for_lbfgs(*trainee.model).empty() || !trainee.on_one_mesh) return;
  if (!turn.side.sharded && !trainee.emulation) turn.side.parting = parting_of_twins(minimization, trainee);
  minimization.run(turn.side, trainee);
}

} // namespace

std::vector<Action> closure_actions() {
  return {{"step with a closure", 5, When::kReduced, step_with_a_closure}, {"minimize", 3, When::kReduced, minimize}};
}

} // namespace tessera::testing::scripts
