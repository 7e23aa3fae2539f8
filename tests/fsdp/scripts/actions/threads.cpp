// Programs that use a model from several threads, one at a time.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <tessera/fsdp/buffers/side_stream.h>

#include <exception>
#include <thread>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>

namespace tessera::testing::scripts {
namespace {

/// The calling thread's stream, where there are streams.
std::optional<c10::Stream> current_stream() {
  if (tests_the_cpu()) return {};
  return c10::impl::VirtualGuardImpl(test_device_type()).getStream(test_device());
}

/// Runs `call` in a new thread, in the calling one's modes and on its stream, and waits for it.
template <typename Call>
void in_a_thread(const Call& call) {
  std::exception_ptr thrown;
  std::thread thread([&, grad_mode = torch::GradMode::is_enabled(), stream = current_stream()] {
    try {
      const torch::AutoGradMode mode(grad_mode);
      const c10::OptionalStreamGuard on(stream);
      call();
    } catch (...) {
      thrown = std::current_exception();
    }
  });
  thread.join();
  if (thrown) std::rethrow_exception(thrown);
}

void backward_in_a_thread(Turn& turn) {
  const bool forward_too = turn.draw.chance(50);
  Tensor loss;
  const auto compute = [&] {
    loss = random_loss(turn);
    turn.side.record_mean(loss);
    interrupt(turn);
  };
  if (!forward_too) compute();
  in_a_thread([&] {
    if (forward_too) compute();
    backward(loss);
  });
}

void step_in_a_thread(Turn& turn) {
  in_a_thread([&] { turn.trainee.optimizer->step(); });
}

/// In a hook of a backward on the CPU alone: on a device a read outside of a backward is that after one that threw.
void evaluate_in_a_thread(Turn& turn) {
  if (turn.depth > 0 && !tests_the_cpu()) return;
  in_a_thread([&] {
    const torch::NoGradGuard no_grad;
    turn.side.record_mean(random_loss(turn));
    interrupt(turn);
  });
}

} // namespace

std::vector<Action> thread_actions() {
  return {{"backward in a thread", 5, When::kBetweenSteps, backward_in_a_thread},
          {"step in a thread", 2, When::kReduced, step_in_a_thread},
          {"evaluate in a thread", 3, When::kAnywhere, evaluate_in_a_thread}};
}

} // namespace tessera::testing::scripts
