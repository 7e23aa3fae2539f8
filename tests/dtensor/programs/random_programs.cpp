#include "random_programs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "random_layouts.h"

namespace tessera::testing {

using at::Tensor;

namespace {

/// A weight for the elements of slot `slot`, of any placements.
Tensor weight_of(const Tensor& tensor, const Stage& stage, uint64_t seed) {
  Random random(seed);
  const auto values = random.values(tensor.sizes().vec());
  return stage.mesh ? Tensor(make(values, *stage.mesh, draw_placements(random, tensor.sizes().vec(), stage.mesh->shape(), true)))
                    : values.to(stage.device);
}

/// The weighted sum of about half of `tensors`, and of the last ones.
Tensor loss_of(const Tensors& tensors, const Stage& stage, uint64_t seed) {
  Tensor loss;
  Random random(seed);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool taken = random.chance(40) || i + 3 >= tensors.size();
    const auto& tensor = tensors[i];
    if (!taken || !tensor.defined() || !is_real(tensor) || !tensor.requires_grad()) continue;
    const auto term = (tensor * weight_of(tensor, stage, seed * 1000 + i)).sum();
    loss = loss.defined() ? loss + term : term;
  }
  return loss;
}

void take_gradients(const Program& program, const Stage& stage, Outcome& outcome) {
  using torch::autograd::grad;
  const auto loss = loss_of(outcome.values, stage, program.seed);
  Tensors leaves, middle;
  for (const auto slot : program.leaves) {
    if (outcome.values[slot].defined()) leaves.push_back(outcome.values[slot]);
  }
  if (!loss.defined() || leaves.empty()) return;
  const auto keep = [&](const Tensors& gradients) {
    outcome.gradients.insert(outcome.gradients.end(), gradients.begin(), gradients.end());
  };
  switch (program.gradients) {
    case Gradients::kOnce: return keep(grad({loss}, leaves, {}, false, false, true));
    case Gradients::kAccumulate:
      loss.backward({}, true);
      (loss * 0.5).backward();
      for (const auto& leaf : leaves) outcome.gradients.push_back(leaf.grad());
      return;
    case Gradients::kMiddle:
      for (size_t slot = program.seed % 3; slot < outcome.values.size(); slot += 3) {
        if (outcome.values[slot].defined() && outcome.values[slot].requires_grad()) middle.push_back(outcome.values[slot]);
      }
      if (!middle.empty()) keep(grad({loss}, middle, {}, true, false, true));
      return keep(grad({loss}, leaves, {}, false, false, true));
    case Gradients::kSecond: {
      const auto first = grad({loss}, leaves, {}, true, true, true);
      const auto penalty = loss_of(first, stage, program.seed + 1);
      keep(first);
      if (penalty.defined()) keep(grad({penalty}, leaves, {}, false, false, true));
    }
  }
}

} // namespace

Outcome run_program(const Program& program, const Stage& stage, const std::vector<bool>& left_out) {
  Outcome outcome;
  outcome.values.resize(program.slots);
  torch::manual_seed(4242);
  size_t i = 0;
  try {
    for (; i < program.steps.size(); ++i) {
      const auto& step = program.steps[i];
      Tensors inputs;
      for (const auto slot : step.inputs) inputs.push_back(outcome.values[slot]);
      const bool complete = std::all_of(inputs.begin(), inputs.end(), [](const Tensor& input) { return input.defined(); });
      if (left_out[i] || !complete) continue;
      const auto outputs = step.run(stage, inputs);
      std::copy_n(outputs.begin(), step.outputs, outcome.values.begin() + static_cast<std::ptrdiff_t>(step.first));
    }
    take_gradients(program, stage, outcome);
  } catch (const c10::Error& error) {
    outcome.error = error.what_without_backtrace();
  } catch (const std::exception& error) {
    outcome.error = error.what();
  }
  if (i < program.steps.size()) outcome.failed_step = i;
  return outcome;
}

std::string to_string(const Program& program, const std::vector<bool>& left_out) {
  constexpr const char* kGradients[]{"gradients", "accumulated gradients", "gradients of intermediate results",
                                     "second gradients"};
  auto text = fmt::format("program {}, {}:\n", program.seed, kGradients[static_cast<int>(program.gradients)]);
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const auto& step = program.steps[i];
    if (left_out[i]) continue;
    text += fmt::format("  {} <- {}({})\n", step.outputs > 0 ? fmt::format("v{}", step.first) : "writes", step.name,
                        step.inputs.empty() ? "" : fmt::format("v{}", fmt::join(step.inputs, ", v")));
  }
  return text;
}

} // namespace tessera::testing
