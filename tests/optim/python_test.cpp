// The optimizers beside those of PyTorch, on the same gradients.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include <tessera/tests/optim/optimizers.h>
#include <tessera/tests/support/subprocess.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::testing::python_test {
namespace {

constexpr int64_t kSteps = 50;

std::vector<std::vector<int64_t>> shapes(const std::string& optimizer) {
  std::vector<std::vector<int64_t>> all{{6, 10}, {10, 6}, {1, 7}, {5, 1}};
  if (!optimizer.starts_with("Muon")) all.insert(all.end(), {{}, {7}, {0}, {3, 4, 2}});
  return all;
}

/// What the script reads: the parameters before and after the steps, and the gradients of each step.
c10::IValue run(const OptimizerCase& each) {
  std::vector<c10::IValue> before, gradients, after;
  std::vector<at::Tensor> parameters;
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{7});
  for (const auto& shape : shapes(each.name)) parameters.push_back(torch::randn(shape, generator).requires_grad_());
  for (const auto& parameter : parameters) before.emplace_back(parameter.detach().clone());
  const auto optimizer = each.make(parameters);
  for (int64_t step = 0; step < kSteps; ++step) {
    for (auto& parameter : parameters) {
      parameter.mutable_grad() = torch::randn(parameter.sizes(), generator);
      gradients.emplace_back(parameter.grad().clone());
    }
    optimizer->step();
  }
  for (const auto& parameter : parameters) after.emplace_back(parameter.detach());
  const auto tuple = [](std::vector<c10::IValue> values) { return c10::ivalue::Tuple::create(std::move(values)); };
  return tuple({tuple(before), tuple(gradients), tuple(after)});
}

bool has_counterpart(const std::string& name) {
  return !name.starts_with("Lion") && !name.starts_with("Lamb") && name != "AdamW8bit";
}

TEST(Optimizers, AreThoseOfPyTorch) {
  const TemporaryFolder folder;
  size_t compared = 0;
  for (const auto& each : optimizer_cases()) {
    if (!has_counterpart(each.name)) continue;
    const auto bytes = torch::pickle_save(run(each));
    std::ofstream(folder.file(each.name + ".pt"), std::ios::binary)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    ++compared;
  }
  const auto result =
      run_program({TESSERA_PYTHON, TESSERA_OPTIMIZERS_SCRIPT, folder.path().string()}, {}, std::chrono::seconds(240));
  ASSERT_EQ(result.status, 0) << result.output;
  EXPECT_NE(result.output.find(std::to_string(compared) + " optimizers agree"), std::string::npos) << result.output;
}

TEST(AdamW8bit, KeepsTheStatesOfBitsandbytes) {
  const TemporaryFolder folder;
  const auto tuple = [](std::vector<c10::IValue> values) { return c10::ivalue::Tuple::create(std::move(values)); };
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{7});
  constexpr int64_t kSize = 20 * 256 + 37;
  auto parameter = torch::randn({kSize}, generator).requires_grad_();
  const auto before = parameter.detach().clone();
  std::vector<c10::IValue> gradients;
  AdamW8bit optimizer({parameter}, AdamW8bitOptions(0.01).weight_decay(0.1));
  for (int64_t step = 0; step < kSteps; ++step) {
    parameter.mutable_grad() = torch::randn({kSize}, generator) * torch::randn({kSize}, generator).exp();
    gradients.emplace_back(parameter.grad().clone());
    optimizer.step();
  }
  const auto& state = static_cast<const AdamW8bitParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
  const auto bytes = torch::pickle_save(tuple(
      {before, tuple(gradients),
       tuple({state.exp_avg(), state.exp_avg_sq(), state.exp_avg_absmax(), state.exp_avg_sq_absmax(), parameter.detach()})}));
  const auto file = folder.file("steps.pt");
  std::ofstream(file, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  const auto result = run_program({TESSERA_PYTHON, TESSERA_BITSANDBYTES_SCRIPT, file}, {}, std::chrono::seconds(240));
  ASSERT_EQ(result.status, 0) << result.output;
  if (result.output.find("skipped: ") != std::string::npos) GTEST_SKIP() << result.output << ": scripts/setup --references";
  EXPECT_NE(result.output.find("8-bit states agree with bitsandbytes"), std::string::npos) << result.output;
}

} // namespace
} // namespace tessera::testing::python_test
