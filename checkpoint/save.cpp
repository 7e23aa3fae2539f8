#include <c10/util/Exception.h>
#include <tessera/checkpoint/catalog.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/index.h>
#include <tessera/checkpoint/plan.h>
#include <tessera/checkpoint/ranks.h>
#include <tessera/checkpoint/staging.h>
#include <tessera/checkpoint/writer.h>

#include <chrono>
#include <optional>

namespace tessera::checkpoint {

namespace {

Json parse_message(const std::string& text) { return parse_json(text, "checkpoint: a rank's message"); }

// Rank 0's index of what all ranks wrote.
Index merge_written(const SavePlan& plan, const std::vector<std::string>& messages) {
  Index index;
  index.saved_at =
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  index.world_size = static_cast<int64_t>(messages.size());
  index.values = plan.values;
  for (const auto& tensor : plan.tensors) {
    const auto& what = tensor.what;
    index.tensors.push_back({what.name, what.aliases, what.dtype, what.sizes, what.layout, {}});
  }
  for (const auto& message : messages) {
    const auto json = parse_message(message);
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

SavePlan plan_from(const std::vector<std::string>& messages) {
  std::vector<RankState> states;
  for (const auto& message : messages) {
    const auto json = parse_message(message);
    states.push_back(rank_state_from_json(JsonView(json, "checkpoint: a rank's message")["state"]));
  }
  return plan_save(states);
}

} // namespace

void save(const StateDict& state, const std::filesystem::path& dir, const SaveOptions& options) {
  TORCH_CHECK(dir.filename() != kLatestName, "checkpoint: ", dir.string(), ": the name \"", kLatestName,
              "\" is kept for the link to the newest checkpoint");
  TORCH_CHECK(options.keep_last >= 0, "checkpoint: keep_last is ", options.keep_last);
  const Ranks ranks;
  std::optional<Staging> staging; // rank 0's
  const auto what = dir.string();
  const auto states = ranks.all("start to save " + what, [&] {
    if (ranks.rank() == 0) staging.emplace(dir, options.overwrite);
    return dump_json({{"folder", staging ? staging->folder().string() : ""}, {"state", to_json(describe(state))}}, "checkpoint");
  });
  const auto plan = plan_from(states);
  const std::filesystem::path folder = parse_message(states[0])["folder"].get<std::string>();
  const auto written =
      ranks.all("save " + what, [&] { return dump_json(to_json(write_parts(plan, ranks.rank(), state, folder)), "checkpoint"); });
  ranks.all("commit " + what, [&] {
    if (staging) {
      write_index(merge_written(plan, written), folder);
      staging->commit();
    }
    return std::string();
  });
  ranks.all("tidy up after the save of " + what, [&] {
    if (staging && options.update_latest) point_latest_to(staging->target());
    if (staging && options.keep_last > 0) keep_last(staging->target().parent_path(), options.keep_last, staging->target());
    return std::string();
  });
}

} // namespace tessera::checkpoint
