#include <tessera/activations/written_buffers.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/stack.h>

#include <absl/container/flat_hash_map.h>

#include <mutex>

#include <tessera/activations/kept_results.h>

namespace tessera::internal {

namespace {

/// The buffers that were found written without a new version.
class SilentlyWritten {
 public:
  bool contains(const at::Tensor& buffer) {
    const std::lock_guard lock(mutex_);
    return buffers_.contains(buffer.unsafeGetTensorImpl());
  }
  void add(const at::Tensor& buffer) {
    const std::lock_guard lock(mutex_);
    absl::erase_if(buffers_, [](const auto& each) { return each.second.expired(); });
    buffers_.emplace(buffer.unsafeGetTensorImpl(), buffer.getIntrusivePtr());
  }

 private:
  std::mutex mutex_;
  /// A weak pointer keeps the address from being another tensor's.
  absl::flat_hash_map<const c10::TensorImpl*, c10::weak_intrusive_ptr<c10::TensorImpl>> buffers_;
};

SilentlyWritten& silently_written() {
  static SilentlyWritten written;
  return written;
}

/// Which of `buffers` have other values than `before`, of those that `asked` has the positions of.
std::vector<size_t> differing(const std::vector<at::Tensor>& buffers, const std::vector<at::Tensor>& before,
                              const std::vector<size_t>& asked) {
  const at::NoGradGuard no_grad;
  const KeptResults::Scope keeps_nothing; // these operators are none of the function's
  std::vector<size_t> found, on_devices;
  std::vector<at::Tensor> differ;
  for (const auto i : asked) {
    if (buffers[i].is_meta()) continue;
    if (buffers[i].is_cpu()) {
      if (!at::equal(buffers[i], before[i])) found.push_back(i);
      continue;
    }
    on_devices.push_back(i);
    differ.push_back(at::ne(buffers[i], before[i]).any());
    differ.back() = differ.back().to(differ.front().device(), /*dtype=*/at::kBool, /*non_blocking=*/true);
  }
  if (differ.empty()) return found;
  const auto on_host = at::stack(differ).cpu();
  for (size_t n = 0; n < on_devices.size(); ++n) {
    if (on_host.const_data_ptr<bool>()[n]) found.push_back(on_devices[n]);
  }
  return found;
}

} // namespace

std::vector<bool> were_written(const std::vector<at::Tensor>& buffers, const std::vector<at::Tensor>& before,
                               const std::vector<VersionWatch>& watches) {
  std::vector<bool> written(buffers.size());
  std::vector<size_t> asked;
  for (size_t i = 0; i < buffers.size(); ++i) {
    written[i] = watches[i].has_changed() || silently_written().contains(buffers[i]);
    if (!written[i]) asked.push_back(i);
  }
  for (const auto i : differing(buffers, before, asked)) {
    silently_written().add(buffers[i]);
    written[i] = true;
  }
  return written;
}

} // namespace tessera::internal
