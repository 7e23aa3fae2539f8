#pragma once

// Internal: the experts of one layer, which are split over ranks.

#include <torch/nn/module.h>

#include <cstdint>
#include <string>

#include <tessera/fsdp/group/expert_mark.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::internal::experts {

/// A list of experts, or a module whose parameters are stacked. `name`: of the module, below that of the call.
class SplitExperts {
 public:
  SplitExperts(torch::nn::Module& module, std::string name, const DeviceMesh& mesh)
      : module_(&module), name_(std::move(name)), mesh_(mesh) {}

  /// Throws where the experts cannot be split.
  void check() const;
  /// A line a parameter, which all ranks have alike.
  std::string describe() const;
  /// Takes those of other ranks away, and marks this rank's.
  void split(const ExpertMark& mark);

 private:
  int64_t count() const;
  std::string full_name(const std::string& parameter) const;
  void split_list(const ExpertMark& mark);
  void split_stacked(const ExpertMark& mark);

  torch::nn::Module* module_;
  std::string name_;
  DeviceMesh mesh_;
};

} // namespace tessera::internal::experts
