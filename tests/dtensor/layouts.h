#pragma once

#include <gtest/gtest.h>
#include <tessera/dtensor/api.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <torch/torch.h>

#include <cmath>
#include <numeric>

#include "../support/line_mesh.h"
#include "../support/matchers.h"
#include "../support/sweep.h"
#include "../support/test_device.h"
#include "../support/world.h"

namespace tessera {
inline std::ostream& operator<<(std::ostream& out, const Placement& placement) { return out << to_string(placement); }
inline std::ostream& operator<<(std::ostream& out, const Placements& placements) { return out << to_string(placements); }
} // namespace tessera

namespace tessera::testing {

/// The whole tensor, plain; every rank of a DTensor's mesh calls it.
inline at::Tensor whole_of(const at::Tensor& tensor) { return is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor; }

/// `whole` in every `ranks`th element, 0 in the others.
inline at::Tensor held_by(int64_t rank, int64_t ranks, const at::Tensor& whole) {
  return torch::where(torch::arange(whole.numel(), whole.device()).remainder(ranks).eq(rank).view(whole.sizes()), whole,
                      torch::zeros_like(whole));
}

/// This rank's part of `whole` by torch.chunk and torch.narrow, independent of the library's own sharding math. Under a Partial
/// the ranks hold different values whose reduction is `whole`, without rounding for small numbers.
inline at::Tensor lay_out(at::Tensor whole, const DeviceMesh& mesh, const Placements& placements) {
  int64_t merged = 0; // leading dims that a RaggedShard took as one, less one
  for (int64_t i = 0; i < mesh.ndim(); ++i) {
    const auto ranks = mesh.size(i), rank = mesh.local_rank(i);
    if (const auto* shard = std::get_if<Shard>(&placements[i])) {
      const auto dim = shard->dim - merged;
      const auto chunks = whole.chunk(ranks, dim);
      whole = rank < static_cast<int64_t>(chunks.size()) ? chunks[rank] : whole.narrow(dim, 0, 0);
    } else if (const auto* strided = std::get_if<StridedShard>(&placements[i])) {
      const auto dim = strided->dim - merged;
      std::vector<at::Tensor> parts{whole.narrow(dim, 0, 0)};
      for (const auto& chunk : whole.chunk(strided->split_factor, dim)) {
        const auto chunks = chunk.chunk(ranks, dim);
        if (rank < static_cast<int64_t>(chunks.size())) parts.push_back(chunks[rank]);
      }
      whole = torch::cat(parts, dim);
    } else if (const auto* ragged = std::get_if<RaggedShard>(&placements[i])) {
      merged = ragged->dim;
      whole = ragged->dim == 0 ? whole : whole.flatten(0, ragged->dim);
      const auto begin = std::min(whole.size(0), ragged->extents.sum_before(static_cast<size_t>(rank)));
      whole = whole.narrow(0, begin, std::min(whole.size(0) - begin, ragged->extents[rank]));
    } else if (const auto* partial = std::get_if<Partial>(&placements[i])) {
      const auto others = ranks * (ranks - 1) / 2;
      switch (partial->op) {
        case Partial::Op::kSum: whole = rank == 0 ? whole - others : torch::full_like(whole, rank); break;
        case Partial::Op::kAvg: whole = rank == 0 ? whole * ranks - others : torch::full_like(whole, rank); break;
        case Partial::Op::kMin: whole = whole + (rank == ranks - 1 ? 0 : rank + 1); break;
        case Partial::Op::kMax: whole = whole - (rank == ranks - 1 ? 0 : rank + 1); break;
        case Partial::Op::kProduct: whole = rank == 0 ? whole / std::pow(2, ranks - 1) : torch::full_like(whole, 2); break;
        case Partial::Op::kNorm: whole = partial->norm_p == 2 && ranks == 4 ? whole / 2 : held_by(rank, ranks, whole); break;
        case Partial::Op::kMask: whole = held_by(rank, ranks, whole); break;
      }
    }
  }
  return whole.clone(at::MemoryFormat::Contiguous).to(mesh.device());
}

/// `whole` as a DTensor, without communication.
inline DTensor make(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  return from_local(lay_out(whole, mesh, placements), mesh, placements, whole.sizes().vec());
}

/// Splits of the first `dim` + 1 dims over `ranks`: uneven, with empty parts, all on one rank.
inline std::vector<Placement> ragged_shards(const std::vector<int64_t>& sizes, int64_t ranks) {
  std::vector<Placement> result;
  int64_t rows = 1;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    rows *= sizes[dim];
    std::vector<int64_t> extents(ranks, 0);
    extents[ranks - 1] = rows;
    result.emplace_back(RaggedShard{static_cast<int64_t>(dim), extents});
    if (ranks == 1) continue;
    extents[0] = rows / 3;
    extents[ranks - 1] = rows - rows / 3;
    result.emplace_back(RaggedShard{static_cast<int64_t>(dim), extents});
  }
  return result;
}

inline std::vector<Placement> shards(const std::vector<int64_t>& sizes) {
  std::vector<Placement> result;
  for (size_t dim = 0; dim < sizes.size(); ++dim) result.emplace_back(Shard{static_cast<int64_t>(dim)});
  return result;
}

/// Replicate, every Shard and RaggedShard and one StridedShard of a tensor of `sizes`.
inline std::vector<Placement> whole_placements(const std::vector<int64_t>& sizes, int64_t ranks) {
  std::vector<Placement> result{Replicate{}};
  for (const auto& placement : shards(sizes)) result.push_back(placement);
  for (const auto& placement : ragged_shards(sizes, ranks)) result.push_back(placement);
  if (!sizes.empty()) result.emplace_back(StridedShard{static_cast<int64_t>(sizes.size()) - 1, 2});
  return result;
}

inline std::vector<Placement> partials() {
  using Op = Partial::Op;
  std::vector<Placement> result;
  for (const auto op : {Op::kSum, Op::kAvg, Op::kMin, Op::kMax, Op::kProduct, Op::kMask}) result.emplace_back(Partial{op});
  result.emplace_back(Partial{Op::kNorm, 2.0});
  return result;
}

} // namespace tessera::testing
