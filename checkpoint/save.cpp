#include <c10/util/Exception.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/formats.h>
#include <tessera/checkpoint/index.h>

namespace tessera::checkpoint {

namespace {

// Rank 0's index of what all ranks wrote.
Index merge_written(const SavePlan& plan, const std::vector<std::string>& messages, int64_t saved_at) {
  Index index;
  index.saved_at = saved_at;
  index.world_size = static_cast<int64_t>(messages.size());
  index.values = plan.values;
  for (const auto& tensor : plan.tensors) {
    const auto& what = tensor.what;
    index.tensors.push_back({what.name, what.aliases, what.dtype, what.sizes, what.layout, {}});
  }
  for (const auto& message : messages) {
    const auto json = parse_json(message, "checkpoint: a rank's message");
    auto written = written_from_json(JsonView(json, "checkpoint: a rank's message"));
    const auto first_file = static_cast<int64_t>(index.files.size());
    index.files.insert(index.files.end(), written.files.begin(), written.files.end());
    for (auto& [tensor, chunk] : written.chunks) {
      chunk.file += first_file;
      index.tensors.at(static_cast<size_t>(tensor)).chunks.push_back(std::move(chunk));
    }
  }
  return index;
}

void write_index(const Index& index, const std::filesystem::path& folder) {
  auto file = File::create(folder / kIndexName);
  file.write(encode_index(index));
  file.sync_and_close();
}

} // namespace

void write_tessera(SaveSession& session, const SavePlan& plan, const std::vector<OwnedPart>& parts) {
  const auto written = session.all("save", [&] {
    return dump_json(to_json(write_parts(parts, session.ranks().rank(), session.folder(), true)), "checkpoint");
  });
  session.commit([&] { write_index(merge_written(plan, written, session.time()), session.folder()); });
}

void write_distributed(SaveSession& session, const std::vector<OwnedPart>& parts) {
  session.all("save", [&] {
    write_parts(parts, session.ranks().rank(), session.folder(), false);
    return std::string();
  });
  session.commit([] {});
}

void save_snapshot(const Ranks& ranks, const Snapshot& snapshot, Planner& planner, const std::filesystem::path& target,
                   const SaveOptions& options) {
  SaveSession session(ranks, target, options);
  const auto& plan = planner.plan(ranks, snapshot.state);
  write_tessera(session, plan, parts_of(plan, ranks.rank(), snapshot));
}

void save(const StateDict& state, const std::filesystem::path& dir, const SaveOptions& options) {
  const Ranks ranks;
  Snapshot snapshot;
  ranks.all("start to save " + dir.string(), [&] {
    snapshot = snapshot_of(state);
    return std::string();
  });
  Planner planner;
  save_snapshot(ranks, snapshot, planner, dir, options);
}

} // namespace tessera::checkpoint
