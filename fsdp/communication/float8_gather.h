#pragma once

// Internal: a weight that is gathered in fp8.

#include <ATen/core/Tensor.h>

#include <any>
#include <optional>
#include <vector>

#include <tessera/activations/version_watch.h>
#include <tessera/collectives/communicator.h>
#include <tessera/fsdp/gather_extension.h>

namespace tessera::internal {

class Float8Gather final : public GatherExtension {
 public:
  explicit Float8Gather(const at::Tensor& parameter) : parameter_(parameter.getIntrusivePtr()) {}

  Sent before(const at::Tensor& shard, const DeviceMesh& mesh) override;
  at::Tensor after(const std::vector<std::vector<at::Tensor>>& gathered, const std::any& metadata,
                   const at::Tensor& out) override;

  /// Connect the ranks that have other parts of the weight.
  std::vector<CommunicatorPtr> communicators() const;
  /// The largest size of a number of `shard`, of one element.
  static at::Tensor largest_of(const at::Tensor& shard);
  /// Makes `largest`, of any number of weights, that of all ranks.
  static void reduce(const at::Tensor& largest, const std::vector<CommunicatorPtr>& communicators);
  /// `scale` is that of all shards, until this one is written, or another one takes its place.
  void know(const at::Tensor& shard, const at::Tensor& scale) {
    known_.emplace(Known{c10::weak_intrusive_ptr<c10::TensorImpl>(shard.getIntrusivePtr()), VersionWatch(shard), scale});
  }

 private:
  struct Known {
    bool is_of(const at::Tensor& other) const {
      return shard._unsafe_get_target() == other.unsafeGetTensorImpl() && !watch.has_changed();
    }

    c10::weak_intrusive_ptr<c10::TensorImpl> shard; ///< the address alone might be another's by now
    VersionWatch watch;
    at::Tensor scale;
  };
  at::Tensor scale_of(const at::Tensor& shard) const;

  c10::weak_intrusive_ptr<c10::TensorImpl> parameter_; ///< whose group owns this extension
  std::optional<Known> known_;
};

} // namespace tessera::internal
