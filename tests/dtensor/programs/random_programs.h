#pragma once

// Programs of DTensor operators, drawn from a seed, that run on plain tensors as well.

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <tessera/mesh/device_mesh.h>

namespace tessera::testing {

using Tensors = std::vector<at::Tensor>;

/// Where a program runs: on DTensors of a mesh, or on plain tensors.
struct Stage {
  std::optional<DeviceMesh> mesh; ///< none: plain tensors
  std::optional<DeviceMesh> line; ///< the same ranks in another order, for moves between meshes
  c10::Device device = c10::kCPU; ///< of plain tensors
};

/// What is computed after the steps.
enum class Gradients {
  kOnce,       ///< autograd::grad
  kAccumulate, ///< backward of a retained graph, twice
  kMiddle,     ///< of intermediate results, then of the leaves
  kSecond,     ///< gradients of gradients
};

struct Step {
  std::string name;
  std::vector<size_t> inputs;                               ///< slots
  std::function<Tensors(const Stage&, const Tensors&)> run; ///< gives `outputs` tensors
  size_t first = 0, outputs = 0;                            ///< the slots that it fills
};

/// Every step fills slots with what it makes of slots before it.
struct Program {
  uint64_t seed = 0;
  std::vector<Step> steps;
  std::vector<size_t> leaves; ///< slots that require grad
  size_t slots = 0;
  double tolerance = 1e-8; ///< larger where a step rounds
  Gradients gradients = Gradients::kOnce;
};

/// The same on every rank and for every machine. `mesh_shape` is that of the stage it will run on.
Program draw_program(uint64_t seed, const std::vector<int64_t>& mesh_shape);

/// What a run leaves.
struct Outcome {
  Tensors values;    ///< by slot; undefined where a step was left out
  Tensors gradients; ///< undefined ones included
  std::optional<size_t> failed_step;
  std::string error; ///< of that step, or of the gradients
};

/// Runs the steps that are not `left_out`, nor need one that is.
Outcome run_program(const Program& program, const Stage& stage, const std::vector<bool>& left_out);

/// One line a step that is not left out.
std::string to_string(const Program& program, const std::vector<bool>& left_out);

} // namespace tessera::testing
