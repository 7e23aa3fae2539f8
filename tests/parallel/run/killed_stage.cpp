// A pipeline whose middle rank is killed in its second step, or throws. Every other rank prints what it hears, and after an
// exception every rank what a new pipeline says.
//
//   killed_stage --ranks 3
//   killed_stage --ranks 3 throw
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <csignal>
#include <iostream>
#include <string_view>

namespace {

bool throws = false;

struct StackImpl : torch::nn::Module {
  explicit StackImpl(int64_t depth) {
    for (int64_t i = 0; i < depth; ++i) linears.emplace_back(register_module(c10::str("linear", i), torch::nn::Linear(4, 4)));
  }
  std::vector<torch::nn::Linear> linears;
};

void end_stage() {
  TORCH_CHECK(!throws, "out of luck");
  (void)std::raise(SIGKILL);
}

void print(const char* what, const c10::Error& error) {
  const auto rank = tessera::process_context().rank();
  std::cout << c10::str("rank ", rank, " ", what, " hears: ", error.what_without_backtrace(), "\n") << std::flush;
}

void train() {
  const int64_t ranks = tessera::process_context().world_size(), rank = tessera::process_context().rank();
  StackImpl stack(ranks);
  int64_t steps = 0;
  tessera::PipelineLayers layers(stack);
  for (int64_t i = 0; i < ranks; ++i) {
    layers.add(c10::str("layer", i), {c10::str("linear", i)}, [&, i](const torch::Tensor& x) {
      if (steps == 1 && rank == ranks / 2) end_stage();
      return stack.linears[static_cast<size_t>(i)](x).tanh();
    });
  }
  const tessera::PipelineLoss loss{
      .sum = [](const tessera::PipelineValue& output, const tessera::PipelineValue&) { return output.toTensor().sum(); }};
  const auto mesh = tessera::init_device_mesh(torch::kCPU, {ranks}, {"pp"});
  const auto stages = tessera::split(layers, mesh);
  const auto make = [&] { return tessera::Pipeline(stages, tessera::PipelineScheduleKind::k1F1B, loss); };
  auto pipeline = make();
  try {
    for (; steps < 2; ++steps) pipeline.step(std::vector<tessera::PipelineValue>(4, torch::ones({2, 4})));
  } catch (const c10::Error& error) {
    print("of the step", error);
    if (!throws) throw;
  }
  make();
}

void worker() {
  tessera::init_process_group();
  at::set_num_threads(1);
  try {
    train();
  } catch (const c10::Error& error) {
    print("of a new pipeline", error);
    throw;
  }
}

} // namespace

int main(int argc, char** argv) {
  throws = argc > 1 && std::string_view(argv[argc - 1]) == "throw";
  try {
    return tessera::launch(tessera::ranks_from_args(argc, argv).value_or(2), worker);
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
}
