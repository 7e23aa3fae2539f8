// A training job in which something goes wrong at its second step: training_program SCENARIO [--ranks N]; without --ranks as the
// rank that the environment says.

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include <tessera/activations/recompute.h>
#include <tessera/collectives/launch.h>
#include <tessera/fsdp/call.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/tests/fsdp/limited_memory.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/simulated_device/simulated_device.h>

namespace tessera::testing {
namespace {

bool is_last_rank() { return world_rank() == world_size() - 1; }

/// The forward of `net`, with `between` called after the first block.
torch::Tensor forward(Net& net, const torch::Tensor& tokens, const std::function<void(torch::Tensor&)>& between) {
  auto x = net->embedded(tokens);
  for (size_t i = 0; i < net->blocks->size(); ++i) {
    x = (*net->blocks)[i]->as<Block>()->forward(x);
    if (i == 0) between(x);
  }
  return torch::matmul(net->norm(x), net->embed->weight.t()).square().mean();
}

void train(const std::function<void(torch::Tensor&)>& at_the_second_step) {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int64_t step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const auto between = step == 1 ? at_the_second_step : [](torch::Tensor&) {};
    forward(net, own_batch(step), between).backward();
    optimizer.step();
  }
}

void killed_in_forward() {
  train([](torch::Tensor&) {
    if (is_last_rank()) std::raise(SIGKILL);
  });
}

void killed_in_backward() {
  train([](torch::Tensor& x) {
    if (is_last_rank()) x.register_hook([](const torch::Tensor&) { std::raise(SIGKILL); });
  });
}

void throws_in_backward() {
  train([](torch::Tensor& x) {
    if (is_last_rank()) x.register_hook([](const torch::Tensor&) { throw std::runtime_error("the gradient is bad"); });
  });
}

/// The last rank runs the third block where the others run the second: same shapes, another group.
void uses_another_group() {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  const auto x = torch::ones({2, net->norm->weight.size(0)}, test_device());
  (*net->blocks)[is_last_rank() ? 2 : 1]->as<Block>()->forward(x).sum().backward();
}

/// The last rank leaves the second block out.
void skips_a_group() {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  auto x = torch::ones({2, net->norm->weight.size(0)}, test_device());
  for (size_t i = 0; i < net->blocks->size(); ++i) {
    if (i != 1 || !is_last_rank()) x = (*net->blocks)[i]->as<Block>()->forward(x);
  }
  x.sum().backward();
}

/// The first step is alike on all ranks. In the second the last rank reads a block before its turn.
void leaves_the_trace() {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  for (const bool leaves : {false, is_last_rank()}) {
    auto x = torch::ones({2, net->norm->weight.size(0)}, test_device());
    for (const size_t i : leaves ? std::vector<size_t>{1, 2, 0} : std::vector<size_t>{0, 1, 2}) {
      x = (*net->blocks)[i]->as<Block>()->forward(x);
    }
    x.sum().backward();
  }
}

/// Two models of one class; the last rank runs them in another order.
void swaps_two_models() {
  Net first = make_net(), second = make_net(1);
  shard_model(first, strategies()[0]);
  shard_model(second, strategies()[0]);
  const auto x = torch::ones({2, first->norm->weight.size(0)}, test_device());
  (*(is_last_rank() ? second : first)->blocks)[0]->as<Block>()->forward(x).sum().backward();
}

/// The last rank divides the gradients by another number.
void divides_differently() {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  fsdp(*(*net->blocks)[0]).set_gradient_divide_factor(is_last_rank() ? 2 : 3);
  forward(net, global_batch(0), [](torch::Tensor&) {}).backward();
}

/// The last rank's function does something else in its second run.
void recomputes_differently() {
  train([](torch::Tensor& x) {
    x = recompute(
        {.name = "the function", .early_stop = false},
        [runs = 0](const torch::Tensor& in) mutable { return runs++ > 0 && is_last_rank() ? in.sum().exp() : in.exp(); }, x);
  });
}

bool fails(const char* when, const std::function<torch::Tensor()>& run) {
  std::string text = "no error";
  try {
    run().item<float>(); // a device's error is found where the host waits for it
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  }
  std::printf("rank %d %s: %s\n", static_cast<int>(world_rank()), when, text.c_str());
  std::fflush(stdout);
  return text != "no error";
}

enum class Pass { kForward, kBackward };

/// The last rank has none for the first gather of the pass, or for what is allocated after `spared` blocks of it, and then has,
/// unless it `stays` so.
void has_no_memory_for_a_gather(const DeviceMesh& mesh, FullyShardOptions options, Pass pass, int spared = 0,
                                bool stays = false) {
  torch::manual_seed(0);
  torch::nn::Linear large(1000, 1000);
  if (!options.reshard_after_forward) options.reshard_after_forward = true;
  fully_shard(*large, mesh, options);
  const auto x = torch::ones({1, 1000}, test_device()).set_requires_grad(true);
  const auto forward = [&] { return tessera::call(large, x).sum(); };
  const auto loss = pass == Pass::kBackward ? forward() : torch::Tensor();
  const auto group = fsdp(*large).state()->group();
  const auto cached = group->cache().allocate(group->layout().unsharded_bytes);
  std::optional<LimitedMemory> limited;
  if (is_last_rank()) limited.emplace(4002000, test_device_type(), spared); // which a gradient has
  const auto backward = [&] {
    loss.backward();
    return x.grad().sum();
  };
  const bool has_failed = loss.defined() ? fails("learns", backward) : fails("learns", forward);
  if (!stays) limited.reset(); // and goes on
  if (has_failed) {
    for (const char* const when : {"again", "a third time"}) fails(when, forward);
  }
  TORCH_CHECK(!has_failed, "no gather");
}

void has_no_memory_for_a_gather(tessera::Strategy strategy, Pass pass, bool stays = false) {
  const auto mesh = init_device_mesh(mesh_device_type, {2, world_size() / 2}, {"outer", "shard"});
  has_no_memory_for_a_gather(mesh, {.strategy = strategy}, pass, 0, stays);
}

/// The last rank calls something else than the gather inside its node; the rank beside it reads the parameters twice.
void reads_after_a_failed_gather() {
  const auto mesh = init_device_mesh(mesh_device_type, {2, world_size() / 2}, {"outer", "shard"});
  torch::manual_seed(0);
  torch::nn::Linear linear(6, 6);
  fully_shard(*linear, mesh, {.strategy = tessera::Strategy::kHierarchical});
  if (is_last_rank()) {
    auto one = torch::ones({1}, test_device());
    mesh.communicator(1, "fsdp.all_gather")->all_reduce(one, ReduceOp::kSum, "something else").wait();
  }
  for (const char* const when : {"first", "again"}) {
    std::string text = "no error";
    try {
      linear->forward(torch::ones({1, 6}, test_device()));
    } catch (const c10::Error& error) {
      text = error.what_without_backtrace();
    }
    std::printf("rank %d %s: %s\n", static_cast<int>(world_rank()), when, text.c_str());
    std::fflush(stdout);
  }
}

/// Each rank forks; the child ends as a program does, with static destructors, and the rank trains on.
void forks() {
  train([](torch::Tensor&) {
    const pid_t child = fork();
    if (child == 0) std::exit(is_initialized() ? 1 : 0);
    int status = 0;
    TORCH_CHECK(waitpid(child, &status, 0) == child && status == 0, "the child ended with status ", status);
  });
}

const std::map<std::string, std::function<void()>> kScenarios{
    {"killed_in_forward", killed_in_forward},
    {"killed_in_backward", killed_in_backward},
    {"throws_in_backward", throws_in_backward},
    {"uses_another_group", uses_another_group},
    {"skips_a_group", skips_a_group},
    {"leaves_the_trace", leaves_the_trace},
    {"swaps_two_models", swaps_two_models},
    {"divides_differently", divides_differently},
    {"reads_after_a_failed_gather", reads_after_a_failed_gather},
    {"recomputes_differently", recomputes_differently},
    {"forks", forks},
    {"leaves_without_destroying", [] { train([](torch::Tensor&) {}); }},
    {"has_no_memory_for_a_gather", [] { has_no_memory_for_a_gather(world_mesh(), {}, Pass::kForward); }},
    {"has_no_memory_for_what_a_gather_sends",
     [] { has_no_memory_for_a_gather(world_mesh(), {.layout = BufferLayout::kPerParameter}, Pass::kForward, 1); }},
    {"has_no_memory_for_a_gather_among_neighbours",
     [] { has_no_memory_for_a_gather(world_mesh(), {.reshard_after_forward = 2}, Pass::kBackward); }},
    {"has_no_memory_for_an_outer_gather", [] { has_no_memory_for_a_gather(tessera::Strategy::kHierarchical, Pass::kForward); }},
    {"has_no_memory_for_an_outer_gather_again",
     [] { has_no_memory_for_a_gather(tessera::Strategy::kHierarchical, Pass::kForward, /*stays=*/true); }},
    {"has_no_memory_for_an_inner_gather", [] { has_no_memory_for_a_gather(tessera::Strategy::kHierarchical, Pass::kBackward); }},
};

int run_scenario(int argc, char** argv) {
  const auto scenario = kScenarios.at(argc > 1 ? argv[1] : "");
  try {
    const auto run = [&] {
      mesh_device_type = test_device_type(); // a fork was loaded where it may be another
      if (test_device_type() == sim::kDeviceType) sim::enable();
      init_process_group();
      scenario();
    };
    if (const auto ranks = ranks_from_args(argc, argv)) return launch(*ranks, run);
    run();
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
  }
  return 1;
}

} // namespace
} // namespace tessera::testing

int main(int argc, char** argv) { return tessera::testing::run_scenario(argc, argv); }
