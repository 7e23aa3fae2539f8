#pragma once

// Internal: how a ScriptModule stays the same as its script.

#include <ATen/core/Tensor.h>

#include <string>

namespace torch::nn {
class Module;
}

namespace tessera::internal {

/// An error if `module` is a ScriptModule, and a parameter of its script (not of submodules) is another tensor now.
void check_script(const torch::nn::Module& module);

/// The ScriptModules at and below `module` take the buffers that their scripts have now. Errors as of `check_script`.
void follow_scripts(const torch::nn::Module& module);

/// Forgets what the optimizing executor compiled of the scripts at and below `module`: it would run whatever the thread asks for.
void forget_compiled(const torch::nn::Module& module);

/// Why a script has no parameters, as the rest of a sentence about `module`; "" for any other module.
std::string why_no_parameters(const torch::nn::Module& module);

/// Whether `module` is a ScriptModule of Python's BatchNorm1d, 2d or 3d.
bool is_scripted_batch_norm(const torch::nn::Module& module);

/// The running mean of a ScriptModule of Python's BatchNorm or InstanceNorm; undefined for any other, and where there is none.
at::Tensor running_mean_of_script(const torch::nn::Module& module);

/// Whether this thread runs TorchScript, with the optimizing executor.
bool runs_optimized_script();

} // namespace tessera::internal
