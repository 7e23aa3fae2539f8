#include <tessera/dtensor/debug.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <mutex>

#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/dtensor/tensor/program_scopes.h>

namespace tessera {

struct internal::RedistributionLog {
  std::mutex mutex; // of the threads of one backward
  std::vector<RedistributionRecord> records;
};

void internal::add_record(RedistributionLog& log, RedistributionRecord record) {
  const std::lock_guard lock(log.mutex);
  log.records.push_back(std::move(record));
}

namespace {

/// The ranges of local dim `d` in the global tensor: "0:2", or "0:2+4:6" under a StridedShard.
std::string ranges_of(const Spec& spec, const std::vector<int64_t>& coordinate, const internal::LocalBox& box, size_t d) {
  const auto dim = static_cast<int64_t>(d + spec.sizes().size() - box.sizes.size());
  const bool is_merged = d == 0 && spec.ragged();
  const bool strided =
      !is_merged && std::any_of(spec.placements().begin(), spec.placements().end(),
                                [dim](const auto& placement) { return is_strided(placement) && shards_dim(placement, dim); });
  std::vector<internal::Extent> held{{box.offsets[d], box.sizes[d]}};
  if (strided && box.sizes[d] > 0)
    held = internal::dim_extents(spec.sizes()[dim], spec.mesh().shape(), coordinate, spec.placements(), dim);
  std::vector<std::string> parts;
  for (const auto& range : held) parts.push_back(fmt::format("{}:{}", range.offset, range.offset + range.size));
  return fmt::format("{}", fmt::join(parts, "+"));
}

} // namespace

CountCollectives::CountCollectives() {
  for (int kind = 0; kind < kCollectiveKinds; ++kind) start_[kind] = process_context().count(static_cast<CollectiveKind>(kind));
}

CollectiveCounters::Count CountCollectives::count(CollectiveKind kind) const {
  const auto now = process_context().count(kind);
  const auto& start = start_[static_cast<int>(kind)];
  return {now.calls - start.calls, now.bytes - start.bytes};
}

int64_t CountCollectives::total_calls() const {
  int64_t calls = 0;
  for (int kind = 0; kind < kCollectiveKinds; ++kind) calls += count(static_cast<CollectiveKind>(kind)).calls;
  return calls;
}

int64_t CountCollectives::total_bytes() const {
  int64_t bytes = 0;
  for (int kind = 0; kind < kCollectiveKinds; ++kind) bytes += count(static_cast<CollectiveKind>(kind)).bytes;
  return bytes;
}

std::string CountCollectives::to_string() const {
  std::vector<std::string> parts;
  for (int kind = 0; kind < kCollectiveKinds; ++kind) {
    const auto counted = count(static_cast<CollectiveKind>(kind));
    if (counted.calls == 0) continue;
    parts.push_back(
        fmt::format("{} {} ({} bytes)", counted.calls, tessera::to_string(static_cast<CollectiveKind>(kind)), counted.bytes));
  }
  return parts.empty() ? "no collectives" : fmt::format("{}", fmt::join(parts, ", "));
}

std::string RedistributionRecord::to_string() const {
  return fmt::format("{}: [{}] {} -> {}, {} bytes", op, fmt::join(sizes, ", "), tessera::to_string(from), tessera::to_string(to),
                     bytes);
}

LogRedistributions::LogRedistributions()
    : log_(std::make_unique<internal::RedistributionLog>()),
      scope_(internal::open_scope([this](auto& scopes) { scopes.log = log_.get(); })) {}

LogRedistributions::~LogRedistributions() = default;

const std::vector<RedistributionRecord>& LogRedistributions::records() const { return log_->records; }

std::string LogRedistributions::to_string() const {
  std::string text;
  for (const auto& record : records()) text += record.to_string() + "\n";
  return text;
}

std::string picture(const at::Tensor& dtensor) {
  const auto* meta = internal::dtensor_meta(dtensor);
  TORCH_CHECK(meta, "picture: this tensor is not a DTensor");
  const auto& spec = *meta->spec;
  const auto& mesh = spec.mesh();
  auto text = spec.to_string();
  for (size_t i = 0; i < mesh.ranks().size(); ++i) {
    const auto coordinate = internal::coordinate_of(static_cast<int64_t>(i), mesh.shape());
    const auto box = internal::local_box(spec.sizes(), mesh.shape(), coordinate, spec.placements());
    std::vector<std::string> ranges;
    for (size_t d = 0; d < box.sizes.size(); ++d) ranges.push_back(ranges_of(spec, coordinate, box, d));
    text += fmt::format("\nrank {}: [{}]", mesh.ranks()[i], fmt::join(ranges, ", "));
    for (const auto& placement : spec.placements()) {
      if (!is_partial(placement)) continue;
      const auto name = to_string(placement); // "Partial(sum)"
      text +=
          placement == Placement(Partial{Partial::Op::kMask}) ? " partial mask" : " partial " + name.substr(8, name.size() - 9);
      break;
    }
  }
  return text;
}

} // namespace tessera
