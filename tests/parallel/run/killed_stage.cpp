// A pipeline whose middle rank is killed in its second step, or throws, of which every rank prints what it hears. After an
// exception all ranks go on with a new pipeline, and each prints that its losses are those of one process; or the rank that threw
// is killed before; or the first rank is killed in the end.
//
//   killed_stage --ranks 3
//   killed_stage --ranks 3 throw
//   killed_stage --ranks 3 throw-and-end
//   killed_stage --ranks 3 throw-and-another-ends
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cmath>
#include <csignal>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>

namespace {

enum class Fate { kKilled, kThrows, kThrowsAndEnds, kThrowsAndAnotherEnds };
Fate fate = Fate::kKilled;

struct StackImpl : torch::nn::Module {
  explicit StackImpl(int64_t depth) {
    for (int64_t i = 0; i < depth; ++i) linears.emplace_back(register_module(c10::str("linear", i), torch::nn::Linear(4, 4)));
  }
  std::vector<torch::nn::Linear> linears;
};

void print(const std::string& text) {
  std::cout << c10::str("rank ", tessera::process_context().rank(), " ", text, "\n") << std::flush;
}

void end_stage() {
  TORCH_CHECK(fate == Fate::kKilled, "out of luck");
  (void)std::raise(SIGKILL);
}

torch::Tensor micro_batch(int64_t step) { return torch::full({2, 4}, 1.0 + 0.1 * static_cast<double>(step)); }

/// The loss of a step of one process on the same four micro-batches.
double step_alone(StackImpl& stack, torch::optim::Optimizer& optimizer, int64_t step) {
  optimizer.zero_grad();
  auto x = micro_batch(step);
  for (auto& linear : stack.linears) x = linear(x).tanh();
  const auto loss = x.sum();
  loss.backward();
  optimizer.step();
  return loss.item<double>();
}

class Job {
 public:
  Job() : stack_(seeded()), alone_(seeded()) {
    tessera::PipelineLayers layers(stack_);
    for (int64_t i = 0; i < ranks_; ++i) {
      layers.add(c10::str("layer", i), {c10::str("linear", i)}, [this, i](const torch::Tensor& x) {
        if (fails_ && rank_ == ranks_ / 2) end_stage();
        if (ends_ && rank_ == 0) (void)std::raise(SIGKILL);
        return stack_.linears[static_cast<size_t>(i)](x).tanh();
      });
    }
    stages_.emplace(tessera::split(layers, tessera::init_device_mesh(torch::kCPU, {ranks_}, {"pp"})));
    optimizer_.emplace(stages_->parameters(), 0.1);
    connect();
  }

  void connect() {
    const tessera::PipelineLoss loss{
        .sum = [](const tessera::PipelineValue& output, const tessera::PipelineValue&) { return output.toTensor().sum(); }};
    pipeline_.emplace(*stages_, tessera::PipelineScheduleKind::k1F1B, loss);
  }
  void step(int64_t number) {
    optimizer_->zero_grad();
    const auto loss = pipeline_->step(std::vector<tessera::PipelineValue>(4, micro_batch(number))).item<double>();
    optimizer_->step();
    const auto expected = step_alone(alone_, alone_optimizer_, number);
    TORCH_CHECK(std::abs(loss - expected) < 1e-5, "step ", number, " has the loss ", loss, ", and one process ", expected);
  }
  /// A step in which the first rank is killed.
  void end() {
    ends_ = true;
    try {
      step(0);
    } catch (const c10::Error& error) {
      print(c10::str("of the last step hears: ", error.what_without_backtrace()));
      throw;
    }
  }
  /// A step that no process makes.
  void fail() {
    fails_ = true;
    try {
      pipeline_->step(std::vector<tessera::PipelineValue>(4, micro_batch(0)));
    } catch (const c10::Error& error) {
      print(c10::str("of the step hears: ", error.what_without_backtrace()));
      if (fate == Fate::kKilled) throw;
    }
    fails_ = false;
    if (fate == Fate::kThrowsAndEnds && rank_ == ranks_ / 2) (void)std::raise(SIGKILL);
    try {
      connect();
    } catch (const c10::Error& error) {
      print(c10::str("of a new pipeline hears: ", error.what_without_backtrace()));
      throw;
    }
  }

 private:
  StackImpl seeded() const {
    torch::manual_seed(1);
    return StackImpl(ranks_);
  }

  const int64_t ranks_ = tessera::process_context().world_size(), rank_ = tessera::process_context().rank();
  StackImpl stack_, alone_;
  torch::optim::SGD alone_optimizer_{alone_.parameters(), 0.1};
  bool fails_ = false, ends_ = false;
  std::optional<tessera::PipelineStages> stages_;
  std::optional<torch::optim::SGD> optimizer_;
  std::optional<tessera::Pipeline> pipeline_;
};

void worker() {
  tessera::init_process_group();
  at::set_num_threads(1);
  Job job;
  for (int64_t number = 0; number < 3; ++number) {
    if (number > 0) job.fail();
    job.step(number);
  }
  print("has gone on as one process");
  if (fate == Fate::kThrowsAndAnotherEnds) job.end();
}

} // namespace

int main(int argc, char** argv) {
  const std::string_view last = argv[argc - 1];
  if (last == "throw") fate = Fate::kThrows;
  if (last == "throw-and-end") fate = Fate::kThrowsAndEnds;
  if (last == "throw-and-another-ends") fate = Fate::kThrowsAndAnotherEnds;
  try {
    return tessera::launch(tessera::ranks_from_args(argc, argv).value_or(2), worker);
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
}
