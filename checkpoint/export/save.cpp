#include <tessera/checkpoint/bytes/file.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/export/formats.h>
#include <tessera/checkpoint/formats/index.h>
#include <tessera/checkpoint/save/settle_differences.h>
#include <tessera/checkpoint/save/storage_save.h>

namespace tessera::internal {

namespace {

// Rank 0's index of what all ranks wrote.
Index merge_written(const SavePlan& plan, const std::vector<std::string>& messages, int64_t saved_at) {
  Index index;
  index.saved_at = saved_at;
  index.world_size = static_cast<int64_t>(messages.size());
  index.values = plan.values;
  for (const auto& tensor : plan.tensors) {
    const auto& what = tensor.what;
    index.tensors.push_back({what.name, what.aliases, what.dtype, what.sizes, what.layout, {}, what.copy});
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

} // namespace

void write_distributed(SaveSession& session, const std::vector<OwnedPart>& parts) {
  session.all("save", [&] { write_parts(parts, session.ranks().rank(), files_in(session.folder()), false); });
  session.commit([] {});
}

void write_tessera(SaveSession& session, const SavePlan& plan, const std::vector<OwnedPart>& parts) {
  const auto written = session.all("save", [&] {
    return dump_json(to_json(write_parts(parts, session.ranks().rank(), files_in(session.folder()), true)), "checkpoint");
  });
  session.commit([&] { write_file(session.folder() / kIndexName, encode_index(merge_written(plan, written, session.time()))); });
}

void write_tessera(StorageSave& session, const SavePlan& plan, const std::vector<OwnedPart>& parts) {
  const auto written = session.all("save", [&] {
    return dump_json(to_json(write_parts(parts, session.ranks().rank(), session.new_files(), true)), "checkpoint");
  });
  session.commit([&] { return encode_index(merge_written(plan, written, session.time())); });
}

void save_snapshot(const Ranks& ranks, const std::function<Snapshot()>& take, Planner& planner, const Destination& to,
                   const checkpoint::SaveOptions& options) {
  Snapshot snapshot;
  const auto prepare = [&] {
    snapshot = take();
    return std::string();
  };
  const auto write = [&](auto&& session) {
    const auto& planned = planner.plan(ranks, snapshot.state);
    const auto choice = options.differing_tensors.value_or(checkpoint::differing_tensors());
    const auto settled = settle_differences(ranks, choice, to.name(), planned, snapshot);
    const auto& plan = settled ? *settled : planned;
    write_tessera(session, plan, parts_of(plan, ranks.rank(), snapshot));
  };
  if (to.storage) {
    write(StorageSave(ranks, *to.storage, to.path.string(), options, prepare));
  } else {
    write(SaveSession(ranks, to.path, options, prepare, {}, to.base));
  }
}

} // namespace tessera::internal

namespace tessera::checkpoint {

namespace {

void save(const StateDict& state, const internal::Destination& to, const SaveOptions& options) {
  const internal::Ranks ranks(options.mesh);
  internal::Planner planner;
  internal::save_snapshot(
      ranks, [&] { return internal::snapshot_of(state); }, planner, to, options);
}

} // namespace

void save(const StateDict& state, const std::filesystem::path& dir, const SaveOptions& options) {
  save(state, internal::Destination{dir}, options);
}

void save(const StateDict& state, Storage& storage, const std::string& name, const SaveOptions& options) {
  save(state, internal::Destination{name, &storage}, options);
}

} // namespace tessera::checkpoint
