#include <c10/util/Exception.h>
#include <tessera/checkpoint/bytes/checksum.h>
#include <tessera/checkpoint/save/catalog.h>
#include <tessera/checkpoint/save/save_session.h>
#include <tessera/checkpoint/save/settle_differences.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

namespace tessera::internal {

SaveStart start_save(const Ranks& ranks, const std::string& target, const checkpoint::SaveOptions& options,
                     const Prepare& prepare, const std::function<std::string()>& make_place) {
  SaveStart start;
  std::vector<std::string> choices;
  const auto messages = ranks.all("start to save " + target, [&] {
    const auto said = prepare ? prepare() : std::string();
    const auto choice = name_of(options.differing_tensors.value_or(checkpoint::differing_tensors()));
    return make_place() + '\0' + choice + '\0' + said; // neither of the first two holds a '\0'
  });
  for (const auto& message : messages) {
    const auto first = message.find('\0'), second = message.find('\0', first + 1);
    if (choices.empty()) start.place = message.substr(0, first);
    choices.push_back(message.substr(first + 1, second - first - 1));
    start.said.push_back(message.substr(second + 1));
  }
  for (size_t i = 1; i < choices.size(); ++i) {
    TORCH_CHECK(choices[i] == choices[0], "checkpoint: cannot save ", target, ": differing_tensors is ", choices[0], " on rank ",
                ranks.rank_of_job(0), " and ", choices[i], " on rank ", ranks.rank_of_job(i));
  }
  return start;
}

SaveSession::SaveSession(const Ranks& ranks, const std::filesystem::path& target, const checkpoint::SaveOptions& options,
                         const Prepare& prepare, const Staged& staged, const std::filesystem::path& base)
    : ranks_(ranks), target_(target), options_(options) {
  auto start = start_save(ranks, target.string(), options, prepare, [&] {
    TORCH_CHECK(!target.empty(), "the path is empty");
    TORCH_CHECK(options.keep_last >= 0, "keep_last is ", options.keep_last);
    if (ranks_.rank() == 0) {
      staging_.emplace(base / target, options.overwrite, staged);
      if (options.keep_last > 0) check_has_number(staging_->target());
      if (options.update_latest) check_latest_is_link(staging_->target().parent_path());
    }
    return staging_ ? staging_->folder().string() : std::string();
  });
  folder_ = std::move(start.place);
  said_ = std::move(start.said);
}

void SaveSession::all_agree(const std::string& verb, const std::function<std::string()>& work) const {
  const auto results = all(verb, [&] { return to_hex(checksum(work())); });
  for (size_t i = 1; i < results.size(); ++i) {
    TORCH_CHECK(results[i] == results[0], "checkpoint: cannot ", verb, " ", target_.string(), ": rank ", ranks_.rank_of_job(i),
                " has other options, or a rename that gives other names, than rank ", ranks_.rank_of_job(0));
  }
}

int64_t SaveSession::time() const {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto latest = time_of_latest(staging_->target().parent_path());
  return std::max<int64_t>(std::chrono::duration_cast<std::chrono::microseconds>(now).count(),
                           std::min(latest, std::numeric_limits<int64_t>::max() - 1) + 1);
}

void SaveSession::commit(const std::function<void()>& finish) {
  all("commit", [&] {
    if (!staging_) return;
    finish();
    staging_->commit();
  });
  all("tidy up after the save of", [&] {
    if (staging_ && options_.update_latest) point_latest_to(staging_->target());
    if (staging_ && options_.keep_last > 0) keep_last(staging_->target().parent_path(), options_.keep_last, staging_->target());
  });
}

} // namespace tessera::internal
