#pragma once

// Internal: which modules the lines of a plan name.

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include <tessera/parallel/styles.h>

namespace tessera::internal::parallel {

/// A module and its path below the module of the plan; "" for that itself.
struct NamedModule {
  std::string path;
  torch::nn::Module* module;
};

/// All modules from `top` downward; one that is registered twice under each of its names.
std::vector<NamedModule> modules_below(torch::nn::Module& top);

/// Whether the wildcards of `pattern` can stand for what `path` has in their place.
bool matches(std::string pattern, std::string path);

/// The modules that `line` names. Without one an error, with the nearest path that there is.
std::vector<NamedModule> modules_of(const PlanLine& line, const std::vector<NamedModule>& all);

} // namespace tessera::internal::parallel
