#include <tessera/parallel/overlap/chunked_product.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace tessera::internal::parallel {

namespace {

/// `sizes` with another last size.
std::vector<int64_t> with_features(c10::IntArrayRef sizes, int64_t features) {
  auto changed = sizes.vec();
  changed.back() = features;
  return changed;
}

std::string label_of_chunk(const std::string& label, int64_t chunk, const SequenceChunks& chunks) {
  return fmt::format("{}, chunk {} of {}", label, chunk + 1, chunks.count());
}

/// Sizes of `like` with the sequence first, and `length` positions.
std::vector<int64_t> sequence_first(const at::Tensor& like, const SequenceChunks& chunks, int64_t length) {
  auto sizes = like.movedim(chunks.dim(), 0).sizes().vec();
  sizes[0] = length;
  return sizes;
}

/// A chunk that is on its way: positions of all ranks, [ranks · length, …].
struct GatheredChunk {
  at::Tensor positions;
  Work work;
};

GatheredChunk start_gather(const at::Tensor& part, int64_t chunk, const SequenceChunks& chunks, const std::string& label) {
  const auto length = chunks.length(chunk);
  const auto piece = chunks.piece(chunks.rank(), chunk);
  auto mine = part.movedim(chunks.dim(), 0).narrow(0, piece.offset, piece.size).contiguous();
  if (piece.size < length) {
    const auto own = std::exchange(mine, at::zeros(sequence_first(part, chunks, length), part.options()));
    mine.narrow(0, 0, piece.size).copy_(own);
  }
  auto all = at::empty(sequence_first(part, chunks, length * chunks.ranks()), part.options());
  auto work = chunks.mesh().communicator()->all_gather_into(all.view(-1), mine.view(-1), label_of_chunk(label, chunk, chunks));
  return {std::move(all), std::move(work)};
}

/// Puts the positions of rank `from` in `chunk`, [length, …], at their places in `whole`.
void put(const at::Tensor& whole, const at::Tensor& positions, int64_t from, int64_t chunk, const SequenceChunks& chunks) {
  const auto piece = chunks.piece(from, chunk);
  if (piece.size == 0) return;
  whole.narrow(chunks.dim(), chunks.part(from).offset + piece.offset, piece.size)
      .copy_(positions.narrow(0, 0, piece.size).movedim(0, chunks.dim()));
}

/// Multiplies what ranks `first` to `last` have in a chunk that has come, and puts it in its place.
void multiply(const GatheredChunk& came, int64_t first, int64_t last, int64_t chunk, const at::Tensor& weight,
              const SequenceChunks& chunks, const GatheredProduct& into) {
  if (first == last) return;
  const auto length = chunks.length(chunk);
  const auto rows = came.positions.narrow(0, first * length, (last - first) * length), product = at::matmul(rows, weight);
  for (int64_t rank = first; rank < last; ++rank) {
    put(into.whole, rows.narrow(0, (rank - first) * length, length), rank, chunk, chunks);
    put(into.product, product.narrow(0, (rank - first) * length, length), rank, chunk, chunks);
  }
}

/// The positions of all ranks in a chunk, [ranks · length, …].
at::Tensor positions_of(const at::Tensor& whole, int64_t chunk, const SequenceChunks& chunks) {
  const auto length = chunks.length(chunk);
  auto rows = at::empty(sequence_first(whole, chunks, length * chunks.ranks()), whole.options());
  for (int64_t rank = 0; rank < chunks.ranks(); ++rank) {
    const auto piece = chunks.piece(rank, chunk);
    const auto place = rows.narrow(0, rank * length, length);
    const auto from = whole.narrow(chunks.dim(), chunks.part(rank).offset + piece.offset, piece.size);
    place.narrow(0, 0, piece.size).copy_(from.movedim(chunks.dim(), 0));
    if (piece.size < length) place.narrow(0, piece.size, length - piece.size).zero_();
  }
  return rows;
}

} // namespace

SequenceChunks::SequenceChunks(DeviceMesh mesh, int64_t dim, int64_t positions, int64_t most)
    : mesh_(std::move(mesh)), dim_(dim), positions_(positions) {
  const auto longest = part(0).size, length = (longest + most - 1) / most;
  count_ = (longest + length - 1) / length; // as chunk_extent counts, which may leave out some
}

Extent SequenceChunks::piece(int64_t rank, int64_t chunk) const {
  const auto of_longest = chunk_extent(part(0).size, count_, chunk);
  const auto own = part(rank).size, begin = std::min(of_longest.offset, own);
  return {begin, std::min(of_longest.offset + of_longest.size, own) - begin};
}

GatheredProduct gather_product(const at::Tensor& part, const at::Tensor& weight, const SequenceChunks& chunks,
                               const std::string& label) {
  const at::NoGradGuard no_grad;
  std::vector<GatheredChunk> coming;
  for (int64_t chunk = 0; chunk < chunks.count(); ++chunk) coming.push_back(start_gather(part, chunk, chunks, label));
  auto sizes = part.sizes().vec();
  sizes[static_cast<size_t>(chunks.dim())] = chunks.positions();
  const GatheredProduct result{at::empty(sizes, part.options()), at::empty(with_features(sizes, weight.size(1)), part.options())};
  const auto rank = chunks.rank();
  const auto own = chunks.part(rank);
  if (own.size > 0) {
    result.product.narrow(chunks.dim(), own.offset, own.size).copy_(at::matmul(part, weight));
    result.whole.narrow(chunks.dim(), own.offset, own.size).copy_(part);
  }
  for (int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    auto& came = coming[static_cast<size_t>(chunk)];
    came.work.wait();
    multiply(came, 0, rank, chunk, weight, chunks, result);
    multiply(came, rank + 1, chunks.ranks(), chunk, weight, chunks, result);
    came.positions.reset();
  }
  return result;
}

at::Tensor scatter_product(const at::Tensor& whole, const at::Tensor& weight, const SequenceChunks& chunks,
                           const std::string& label) {
  const at::NoGradGuard no_grad;
  std::vector<GatheredChunk> going;
  for (int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    const auto product = at::matmul(positions_of(whole, chunk, chunks), weight);
    auto sum = at::empty_like(product.narrow(0, 0, chunks.length(chunk)), at::MemoryFormat::Contiguous);
    auto work = chunks.mesh().communicator()->reduce_scatter(sum.view(-1), product.view(-1), ReduceOp::kSum,
                                                             label_of_chunk(label, chunk, chunks));
    going.push_back({std::move(sum), std::move(work)});
  }
  auto sizes = with_features(whole.sizes(), weight.size(1));
  sizes[static_cast<size_t>(chunks.dim())] = chunks.part(chunks.rank()).size;
  auto own = at::empty(sizes, whole.options());
  for (int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    auto& came = going[static_cast<size_t>(chunk)];
    came.work.wait();
    const auto piece = chunks.piece(chunks.rank(), chunk);
    if (piece.size == 0) continue;
    own.narrow(chunks.dim(), piece.offset, piece.size).copy_(came.positions.narrow(0, 0, piece.size).movedim(0, chunks.dim()));
  }
  return own;
}

} // namespace tessera::internal::parallel
