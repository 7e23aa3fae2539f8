#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <tessera/checkpoint/boxes/pieces.h>
#include <tessera/checkpoint/bytes/parallel.h>
#include <tessera/checkpoint/formats/safetensors.h>
#include <tessera/checkpoint/save/snapshot.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

namespace tessera::internal {

namespace {

constexpr size_t kCopiedAtOnce = size_t{16} << 20;

// A copy on the host, for which std::memcpy is faster than at::copy_: it writes large blocks past the caches.
struct PlainCopy {
  char* to;
  const char* from;
  size_t bytes;
};

void append_copy(const at::Tensor& to, const at::Tensor& from, std::vector<PlainCopy>& copies) {
  auto* target = static_cast<char*>(to.mutable_data_ptr());
  const auto* source = static_cast<const char*>(from.const_data_ptr());
  for (size_t begin = 0; begin < from.nbytes(); begin += kCopiedAtOnce)
    copies.push_back({target + begin, source + begin, std::min(kCopiedAtOnce, from.nbytes() - begin)});
}

/// Text that is not UTF-8 is an error: the index is JSON.
void check_names(const StateDict::Entry& entry) {
  const auto check = [&](const std::string& name) {
    const std::string quoted = fmt::format("{:?}", name); // with \x.. for each byte that is no UTF-8
    dump_json(Json(name), "checkpoint: the name " + quoted + (entry.is_tensor() ? " of a tensor" : " of a value"));
  };
  check(entry.name);
  for (const auto& alias : entry.aliases) check(alias);
}

} // namespace

Snapshot snapshot_of(const StateDict& state) {
  Snapshot snapshot;
  MeshNames meshes;
  for (const auto& entry : state.entries()) check_names(entry); // before the values of an optimizer, which hold them too
  for (const auto& entry : state.entries()) {
    if (!entry.is_tensor()) {
      const auto& value = std::get<StateValue>(entry.content);
      dump_json(to_json(value), "checkpoint: value \"" + entry.name + "\""); // text that is not UTF-8 is an error
      snapshot.state.values.emplace_back(entry.name, value);
      continue;
    }
    const auto& tensor = std::get<at::Tensor>(entry.content);
    Holding holding{entry.name, entry.aliases, tensor.scalar_type(), tensor.sizes().vec(), layout_of(tensor), meshes.of(tensor),
                    {}};
    safetensors_dtype(holding.dtype, "checkpoint: tensor \"" + entry.name + "\"");
    auto& data = snapshot.data.emplace_back();
    for (auto& piece : pieces_of(entry.name, tensor, Access::kRead)) {
      holding.boxes.push_back(std::move(piece.box));
      data.push_back(std::move(piece.data));
    }
    snapshot.state.tensors.push_back(std::move(holding));
  }
  return snapshot;
}

Snapshot HostCopies::copy(const Snapshot& snapshot) {
  const c10::NoGradGuard no_grad;
  Snapshot copy{snapshot.state, {}};
  std::vector<PlainCopy> plain;
  size_t used = 0;
  for (const auto& pieces : snapshot.data) {
    auto& copies = copy.data.emplace_back();
    for (const auto& piece : pieces) {
      if (used == memory_.size()) memory_.emplace_back();
      auto& memory = memory_[used++];
      const bool fits = memory.defined() && memory.sizes() == piece.sizes() && memory.scalar_type() == piece.scalar_type();
      if (!fits) memory = at::empty(piece.sizes(), piece.options().device(at::kCPU).pinned_memory(!piece.is_cpu()));
      copies.push_back(memory);
      if (is_plain_memory(piece)) {
        append_copy(memory, piece, plain);
      } else {
        memory.copy_(piece);
      }
    }
  }
  memory_.resize(used);
  for_each_in_parallel(std::ssize(plain), [&](int64_t i) {
    const auto& [to, from, bytes] = plain[static_cast<size_t>(i)];
    std::memcpy(to, from, bytes);
  });
  return copy;
}

} // namespace tessera::internal
