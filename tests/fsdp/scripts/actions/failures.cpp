// Exceptions of the program in the middle of a forward or a backward.
#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>

#include <optional>

namespace tessera::testing::scripts {
namespace {

const char* const kUsersError = "an error of the program's own";

/// Runs `call`, and takes the program's own exception.
template <typename Call>
void survive(const Call& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    if (std::string(error.what()) != kUsersError) throw;
  }
}

void failed_forward(Turn& turn) {
  const auto at = static_cast<size_t>(turn.draw.below(4));
  std::optional<torch::NoGradGuard> no_grad;
  if (turn.draw.chance(30)) no_grad.emplace();
  survive([&] {
    random_loss(turn, [&](size_t position, const Tensor& x) {
      if (position == at) throw std::runtime_error(kUsersError);
      return x;
    });
  });
}

/// A loss whose next backward throws somewhere on its way, and later ones do not.
Tensor loss_that_fails_once(Turn& turn) {
  const auto at = static_cast<size_t>(turn.draw.below(4));
  const auto failed = std::make_shared<bool>(false);
  return random_loss(turn, [&](size_t position, const Tensor& x) {
    if (position != at || !x.requires_grad()) return x;
    auto y = x * 1.0;
    y.register_hook([failed](const Tensor& gradient) {
      if (!std::exchange(*failed, true)) throw std::runtime_error(kUsersError);
      return gradient;
    });
    return y;
  });
}

/// What landed before the exception is given up.
void fail_and_zero(Turn& turn, const Tensor& loss, bool retain_graph) {
  survive([&] { backward(loss, retain_graph); });
  turn.trainee.model->zero_grad();
}

void failed_backward(Turn& turn) {
  const auto loss = loss_that_fails_once(turn);
  interrupt(turn);
  fail_and_zero(turn, loss, /*retain_graph=*/false);
}

void failed_backward_before_another(Turn& turn) {
  const bool earlier = turn.draw.chance(50);
  const bool retained = turn.draw.chance(30);
  Tensor loss;
  if (earlier) loss = random_loss(turn);
  const auto fails = loss_that_fails_once(turn);
  if (!earlier) loss = random_loss(turn);
  if (retained) backward(loss, /*retain_graph=*/true);
  fail_and_zero(turn, fails, /*retain_graph=*/false);
  backward(loss);
}

void failed_backward_again(Turn& turn) {
  const auto loss = loss_that_fails_once(turn);
  fail_and_zero(turn, loss, /*retain_graph=*/true);
  interrupt(turn);
  turn.trainee.model->zero_grad();
  backward(loss);
}

} // namespace

std::vector<Action> failure_actions() {
  return {{"failed forward", 5, When::kBetweenSteps, failed_forward},
          {"failed backward", 5, When::kReduced, failed_backward},
          {"failed backward before another", 4, When::kReduced, failed_backward_before_another},
          {"failed backward again", 4, When::kReduced, failed_backward_again}};
}

} // namespace tessera::testing::scripts
