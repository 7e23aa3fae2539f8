#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <tessera/base/error_text.h>
#include <tessera/checkpoint/boxes/runs.h>
#include <tessera/checkpoint/bytes/checksum.h>
#include <tessera/checkpoint/formats/reader.h>
#include <tessera/checkpoint/formats/safetensors.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>

namespace tessera::internal {

namespace {

// Runs of at least this many bytes are worth a read of their own where nothing is verified.
constexpr int64_t kDirectBytes = 16384;

} // namespace

Reader::Reader(CheckpointSource source, const Index& index, bool verify)
    : source_(std::move(source)), index_(index), verify_(verify) {}

const ByteSource& Reader::file(int64_t position) {
  const std::lock_guard lock(opening_);
  if (const auto found = files_.find(position); found != files_.end()) return *found->second;
  const auto& indexed = index_.files[static_cast<size_t>(position)];
  auto file = source_.open(indexed.name);
  const auto path = file->name();
  TORCH_CHECK(file->size() == indexed.bytes, path, " has ", file->size(), " bytes where the checkpoint wrote ", indexed.bytes);
  if (verify_) {
    std::string prefix(static_cast<size_t>(indexed.data_begin), '\0');
    file->read_at(prefix.data(), prefix.size(), 0);
    TORCH_CHECK(checksum(prefix) == indexed.header_checksum, path,
                " is damaged: its header has another checksum than when it was written");
  }
  return *files_.emplace(position, std::move(file)).first->second;
}

void Reader::read(const IndexedTensor& tensor, const Piece& piece) {
  const bool direct = is_plain_memory(piece.data) && piece.data.scalar_type() == tensor.dtype;
  const auto staged = direct ? piece.data : at::empty(piece.box.sizes, tensor.dtype);
  for (const auto& chunk : tensor.chunks) {
    if (const auto common = intersect(chunk.box, piece.box))
      read_chunk(tensor, chunk, *common, piece.box, static_cast<char*>(staged.data_ptr()));
  }
  if (!direct) piece.data.copy_(staged);
}

void Reader::read_data(const Chunk& chunk, int64_t begin, int64_t bytes, char* out) {
  file(chunk.file).read_at(out, static_cast<size_t>(bytes), chunk.begin + begin);
  bytes_read_ += bytes;
}

void Reader::read_block(const IndexedTensor& tensor, const Chunk& chunk, int64_t block, int64_t bytes, char* out) {
  const auto begin = block * index_.block_bytes;
  read_data(chunk, begin, bytes, out);
  const bool intact = !verify_ || checksum(out, static_cast<size_t>(bytes)) == chunk.checksums[static_cast<size_t>(block)];
  TORCH_CHECK(intact, file(chunk.file).name(), " is damaged: tensor \"", tensor.name, "\", bytes ", chunk.begin + begin, " to ",
              chunk.begin + begin + bytes, " have another checksum than when they were written");
}

// `out` is the row-major memory of `box`.
void Reader::read_chunk(const IndexedTensor& tensor, const Chunk& chunk, const Box& wanted, const Box& box, char* out) {
  const auto item = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  const auto chunk_bytes = chunk.box.numel() * item, block_bytes = index_.block_bytes;
  const auto wanted_bytes = wanted.numel() * item;
  std::vector<char> block_data;
  int64_t loaded = -1; // the block in block_data
  for_each_run(wanted, chunk.box, box, [&](int64_t from, int64_t to, int64_t length) {
    from *= item;
    const auto run_bytes = length * item;
    auto* target = out + to * item;
    if (!verify_ && (run_bytes >= kDirectBytes || run_bytes == wanted_bytes)) return read_data(chunk, from, run_bytes, target);
    for (const auto end = from + run_bytes; from < end;) {
      const auto block = from / block_bytes, block_begin = block * block_bytes;
      const auto block_size = std::min(block_bytes, chunk_bytes - block_begin);
      const auto take = std::min(end, block_begin + block_size) - from;
      if (take == block_size) { // the whole block, straight to its place
        read_block(tensor, chunk, block, take, target);
      } else {
        if (loaded != block) {
          block_data.resize(static_cast<size_t>(block_size));
          read_block(tensor, chunk, block, block_size, block_data.data());
          loaded = block;
        }
        std::memcpy(target, block_data.data() + (from - block_begin), static_cast<size_t>(take));
      }
      from += take;
      target += take;
    }
  });
}

void Reader::verify_chunk(const IndexedTensor& tensor, const Chunk& chunk, const std::function<void(int64_t)>& progress) {
  const auto total = chunk.box.numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
  std::vector<char> block(static_cast<size_t>(std::min(index_.block_bytes, total)));
  for (int64_t begin = 0; begin < total; begin += index_.block_bytes) {
    const auto size = std::min(index_.block_bytes, total - begin);
    read_block(tensor, chunk, begin / index_.block_bytes, size, block.data());
    progress(size);
  }
}

std::vector<std::string> Reader::verify_all(const std::function<void(int64_t)>& progress) {
  std::vector<std::string> findings;
  std::set<int64_t> bad_files; // their chunks cannot be read
  const auto note = [&](const auto& work) {
    try {
      work();
      return true;
    } catch (const std::exception& error) { // also those of a program's storage
      findings.push_back(error_text(error));
      return false;
    }
  };
  for (int64_t i = 0; i < std::ssize(index_.files); ++i) {
    const bool good = note([&] {
      const auto& source = file(i);
      if (!source.name().ends_with(".safetensors")) return;
      parse_safetensors(read_safetensors_prefix(source), source.size(), source.name());
    });
    if (!good) bad_files.insert(i);
  }
  if (!verify_) return findings;
  for (const auto& tensor : index_.tensors) {
    for (const auto& chunk : tensor.chunks) {
      if (!bad_files.count(chunk.file)) note([&] { verify_chunk(tensor, chunk, progress); });
    }
  }
  return findings;
}

} // namespace tessera::internal
