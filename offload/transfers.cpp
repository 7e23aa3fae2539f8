#include <tessera/offload/transfers.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace tessera::internal {

std::vector<TransferPiece> cut(const std::vector<TransferPiece>& pieces) {
  std::vector<TransferPiece> small;
  for (auto piece : pieces) {
    for (int64_t left = piece.bytes; left > 0; left -= piece.bytes) {
      piece.bytes = std::min(left, kTransferBytes);
      small.push_back(piece);
      piece.memory += piece.bytes;
      piece.offset += piece.bytes;
    }
  }
  return small;
}

Transfers& process_transfers() {
  // Never freed: files may outlive static objects.
  static const auto* const transfers = [] {
    const char* const chosen = std::getenv("TESSERA_OFFLOAD_IO");
    const bool threads = chosen && std::string_view(chosen) == "threads";
    TORCH_CHECK(threads || !chosen || !*chosen, "environment variable TESSERA_OFFLOAD_IO=", chosen,
                " must be threads, or not set");
    auto made = threads ? nullptr : make_uring_transfers();
    return new std::shared_ptr<Transfers>(made ? made : make_thread_transfers());
  }();
  return **transfers;
}

} // namespace tessera::internal
