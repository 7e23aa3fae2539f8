#include <tessera/collectives/calls/signature.h>

#define XXH_INLINE_ALL
#include <c10/util/StringUtil.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>

namespace tessera::internal {

namespace {

/// A send meets a receive.
uint8_t met_by(uint8_t kind) {
  return static_cast<CollectiveKind>(kind) == CollectiveKind::kReceive ? static_cast<uint8_t>(CollectiveKind::kSend) : kind;
}

} // namespace

const char* to_string(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return "sum";
    case ReduceOp::kAvg: return "avg";
    case ReduceOp::kMin: return "min";
    case ReduceOp::kMax: return "max";
    case ReduceOp::kProduct: return "product";
  }
  return "unknown";
}

Signature make_signature(CollectiveKind kind, std::string_view label, c10::ScalarType dtype, int64_t bytes, ReduceOp op,
                         int root) {
  Signature signature;
  signature.kind = static_cast<uint8_t>(kind);
  signature.dtype = static_cast<int8_t>(dtype);
  signature.reduce_op = static_cast<uint8_t>(op);
  signature.root = root;
  signature.bytes = kind == CollectiveKind::kAllToAll ? 0 : bytes;
  signature.label_hash = XXH3_64bits(label.data(), label.size());
  signature.label_length = static_cast<uint8_t>(std::min(label.size(), Signature::kLabelCapacity));
  std::memcpy(signature.label, label.data(), signature.label_length);
  return signature;
}

bool Signature::same_collective(const Signature& other) const {
  return sequence == other.sequence && label_hash == other.label_hash && bytes == other.bytes && root == other.root &&
         met_by(kind) == met_by(other.kind) && reduce_op == other.reduce_op && dtype == other.dtype;
}

std::string Signature::to_string() const {
  const auto what = static_cast<CollectiveKind>(kind);
  std::string text = c10::str(tessera::to_string(what), " '", label_text(), "' (");
  if (what != CollectiveKind::kAllToAll && what != CollectiveKind::kBarrier) text += c10::str(bytes, " bytes of ");
  if (what != CollectiveKind::kBarrier) text += c10::str(c10::toString(static_cast<c10::ScalarType>(dtype)), ", ");
  if (reduces(what)) text += c10::str(internal::to_string(static_cast<ReduceOp>(reduce_op)), ", ");
  if (root >= 0) text += c10::str("root ", root, ", ");
  return text + c10::str("call ", sequence, ")");
}

std::string describe_signatures(const std::vector<Signature>& signatures, const std::vector<int64_t>& ranks) {
  std::string text;
  for (size_t i = 0; i < signatures.size(); ++i) text += c10::str("\n  rank ", ranks[i], ": ", signatures[i].to_string());
  return text;
}

} // namespace tessera::internal
