#include <tessera/optim/parts/on_whole.h>

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <variant>

#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/dtensor/tensor/pieces.h>

namespace tessera::internal {

namespace {

using Compute = std::function<at::Tensor(const at::Tensor&)>;

/// The ranks that hold the parts of a tensor: those along the dims that split it.
struct Holders {
  DeviceMesh mesh;
  std::vector<int64_t> dims;

  bool operator==(const Holders&) const = default;

  int64_t count() const {
    int64_t product = 1;
    for (const auto dim : dims) product *= mesh.size(dim);
    return product;
  }
  CommunicatorPtr communicator() const {
    if (dims.size() == 1) return mesh.communicator(dims[0]);
    return mesh.slice(dims).flatten().communicator();
  }
  /// Returns the place of the `index`-th of them in the mesh.
  std::vector<int64_t> coordinate(int64_t index) const {
    std::vector<int64_t> shape;
    for (const auto dim : dims) shape.push_back(mesh.size(dim));
    const auto within = coordinate_of(index, shape);
    auto all = *mesh.coordinate();
    for (size_t i = 0; i < dims.size(); ++i) all[dims[i]] = within[i];
    return all;
  }
};

Holders holders_of(const Spec& spec) {
  Holders holders{spec.mesh(), {}};
  for (size_t d = 0; d < spec.placements().size(); ++d) {
    if (!std::holds_alternative<Replicate>(spec.placements()[d])) holders.dims.push_back(static_cast<int64_t>(d));
  }
  return holders;
}

/// A rough measure of the products of a matrix with its own kind.
double cost_of(const Spec& spec) {
  const auto rows = spec.dim() > 0 ? spec.sizes()[0] : 1;
  const auto columns = rows > 0 ? spec.numel() / rows : 0;
  return static_cast<double>(spec.numel()) * static_cast<double>(std::min(rows, columns));
}

/// The index of the rank that computes each tensor: the costliest first, to whoever has the least to do.
std::vector<int64_t> owners_of(const std::vector<SpecPtr>& specs, int64_t ranks) {
  std::vector<size_t> order(specs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return cost_of(*specs[a]) > cost_of(*specs[b]); });
  std::vector<double> load(static_cast<size_t>(ranks), 0);
  std::vector<int64_t> owners(specs.size());
  for (const auto i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    *least += cost_of(*specs[i]);
    owners[i] = least - load.begin();
  }
  return owners;
}

/// The tensors of one set of holders, while they go to their owners and back.
class Exchange {
 public:
  Exchange(const Holders& holders, std::vector<SpecPtr> specs, at::TensorOptions options)
      : holders_(holders),
        communicator_(holders.communicator()),
        specs_(std::move(specs)),
        owners_(owners_of(specs_, holders.count())),
        options_(options) {
    const auto ranks = static_cast<size_t>(holders.count());
    for (size_t rank = 0; rank < ranks; ++rank) coordinates_.push_back(holders.coordinate(static_cast<int64_t>(rank)));
    own_splits_.assign(ranks, 0);
    owned_splits_.assign(ranks, 0);
    for (size_t i = 0; i < specs_.size(); ++i) {
      own_splits_[owners_[i]] += c10::multiply_integers(specs_[i]->local_sizes());
      if (!is_mine(i)) continue;
      for (size_t rank = 0; rank < ranks; ++rank) owned_splits_[rank] += c10::multiply_integers(sizes_at(i, rank));
    }
  }

  /// The parts of this rank after `compute` of the whole tensors; `parts` are those before it.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& parts, const Compute& compute, std::string_view label) const {
    const auto own = at::empty({total(own_splits_)}, options_), owned = at::empty({total(owned_splits_)}, options_);
    for_each_own(own, [&](size_t i, const at::Tensor& segment) { segment.copy_(parts[i]); });
    communicator_->all_to_all(owned, own, owned_splits_, own_splits_, label).wait();
    compute_owned(owned, compute);
    communicator_->all_to_all(own, owned, own_splits_, owned_splits_, label).wait();
    std::vector<at::Tensor> results(parts.size());
    for_each_own(own, [&](size_t i, const at::Tensor& segment) { results[i] = segment; });
    return results;
  }

 private:
  bool is_mine(size_t tensor) const { return owners_[tensor] == communicator_->rank(); }
  std::vector<int64_t> sizes_at(size_t tensor, size_t rank) const {
    const auto& spec = *specs_[tensor];
    return local_box(spec.sizes(), spec.mesh().shape(), coordinates_[rank], spec.placements()).sizes;
  }
  static int64_t total(const std::vector<int64_t>& splits) { return std::accumulate(splits.begin(), splits.end(), int64_t{0}); }

  /// Visits this rank's part of each tensor in the buffer that goes to the owners: by owner, then in the order of the list.
  template <typename Visit> // void(size_t, const at::Tensor&)
  void for_each_own(const at::Tensor& buffer, const Visit& visit) const {
    int64_t position = 0;
    for (int64_t owner = 0; owner < holders_.count(); ++owner) {
      for (size_t i = 0; i < specs_.size(); ++i) {
        if (owners_[i] != owner) continue;
        const auto& sizes = specs_[i]->local_sizes();
        const auto length = c10::multiply_integers(sizes);
        visit(i, buffer.narrow(0, position, length).view(sizes));
        position += length;
      }
    }
  }

  /// The pieces of each owned tensor in the buffer of the owner: by rank, then in the order of the list.
  std::vector<std::pair<size_t, std::vector<Piece>>> owned_pieces(const at::Tensor& buffer) const {
    std::vector<std::pair<size_t, std::vector<Piece>>> owned;
    for (size_t i = 0; i < specs_.size(); ++i) {
      if (is_mine(i)) owned.emplace_back(i, std::vector<Piece>());
    }
    int64_t position = 0;
    for (size_t rank = 0; rank < coordinates_.size(); ++rank) {
      for (auto& [i, pieces] : owned) {
        const auto sizes = sizes_at(i, rank);
        const auto length = c10::multiply_integers(sizes);
        auto of_rank = pieces_of_part(buffer.narrow(0, position, length).view(sizes), *specs_[i], coordinates_[rank]);
        std::move(of_rank.begin(), of_rank.end(), std::back_inserter(pieces));
        position += length;
      }
    }
    return owned;
  }

  void compute_owned(const at::Tensor& buffer, const Compute& compute) const {
    for (const auto& [i, pieces] : owned_pieces(buffer)) {
      const auto tensor = at::empty(specs_[i]->sizes(), options_);
      for (const auto& piece : pieces) narrow(tensor, piece.box).copy_(piece.data);
      const auto result = compute(tensor);
      for (const auto& piece : pieces) piece.data.copy_(narrow(result, piece.box));
    }
  }

  const Holders& holders_;
  const CommunicatorPtr communicator_;
  const std::vector<SpecPtr> specs_;
  const std::vector<int64_t> owners_;
  const at::TensorOptions options_;
  std::vector<std::vector<int64_t>> coordinates_; ///< of the holders, in their order
  std::vector<int64_t> own_splits_;               ///< elements of this rank's parts, by owner
  std::vector<int64_t> owned_splits_;             ///< elements of the tensors that this rank owns, by the rank that holds them
};

/// `compute` of a tensor that this rank has whole; a rank outside the mesh has nothing to compute.
at::Tensor on_own(const at::Tensor& tensor, const Compute& compute) {
  const auto* meta = dtensor_meta(tensor);
  if (!meta) return compute(tensor);
  return meta->spec->on_mesh() ? make_dtensor(compute(meta->local), meta->spec) : tensor;
}

} // namespace

std::vector<at::Tensor> on_whole(const std::vector<at::Tensor>& tensors, const Compute& compute, std::string_view label) {
  std::vector<at::Tensor> results(tensors.size());
  std::vector<std::pair<Holders, std::vector<size_t>>> groups;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto* meta = dtensor_meta(tensors[i]);
    auto holders = meta ? holders_of(*meta->spec) : Holders();
    if (!meta || !meta->spec->on_mesh() || holders.dims.empty()) {
      results[i] = on_own(tensors[i], compute);
      continue;
    }
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const auto& group) { return group.first == holders; });
    auto& members = same != groups.end() ? same->second : groups.emplace_back(std::move(holders), std::vector<size_t>()).second;
    members.push_back(i);
  }
  for (const auto& [holders, members] : groups) {
    std::vector<SpecPtr> specs;
    std::vector<at::Tensor> parts;
    for (const auto i : members) {
      specs.push_back(dtensor_meta(tensors[i])->spec);
      parts.push_back(dtensor_meta(tensors[i])->local);
    }
    const auto options = parts[0].options().device(holders.mesh.device()).requires_grad(false);
    const auto computed = Exchange(holders, specs, options).run(parts, compute, label);
    for (size_t k = 0; k < members.size(); ++k) results[members[k]] = make_dtensor(computed[k].to(parts[k].device()), specs[k]);
  }
  return results;
}

} // namespace tessera::internal
