#pragma once

// Internal: reads boxes of tensors from the files of a checkpoint.

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <tessera/checkpoint/boxes/pieces.h>
#include <tessera/checkpoint/formats/checkpoint_source.h>
#include <tessera/checkpoint/formats/index.h>

namespace tessera::internal {

/// The files of one checkpoint, opened when they are first needed. `read` may be called from several threads.
class Reader {
 public:
  /// `index` must outlive the reader. With `verify`, every byte read is compared with its checksum: headers when a file is
  /// opened, and data in whole blocks, which are read for that even where only a part of them is needed.
  Reader(CheckpointSource source, const Index& index, bool verify);

  /// Fills the piece, whose box lies in the tensor, from the chunks that intersect it. Converts where its dtype is another one.
  void read(const IndexedTensor& tensor, const Piece& piece);

  /// Checks the header of every file and, with `verify`, every byte against its checksum; one line for each finding. `progress`
  /// is called with the bytes of data verified since the last call.
  std::vector<std::string> verify_all(const std::function<void(int64_t)>& progress = [](int64_t) {});

  /// Bytes of data read so far.
  int64_t bytes_read() const { return bytes_read_; }

 private:
  const ByteSource& file(int64_t position);
  void read_chunk(const IndexedTensor& tensor, const Chunk& chunk, const Box& wanted, const Box& box, char* out);
  void read_data(const Chunk& chunk, int64_t begin, int64_t bytes, char* out);
  void read_block(const IndexedTensor& tensor, const Chunk& chunk, int64_t block, int64_t bytes, char* out);
  void verify_chunk(const IndexedTensor& tensor, const Chunk& chunk, const std::function<void(int64_t)>& progress);

  CheckpointSource source_;
  const Index& index_;
  bool verify_;
  std::mutex opening_;
  std::map<int64_t, std::unique_ptr<ByteSource>> files_;
  std::atomic<int64_t> bytes_read_ = 0;
};

} // namespace tessera::internal
