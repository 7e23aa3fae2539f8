#include <tessera/collectives/backends/hierarchical/call.h>

#include <tessera/base/error_text.h>

#include <c10/util/Exception.h>

#include <utility>

namespace tessera::internal::hierarchical {

namespace {

std::string text_of(const std::exception_ptr& failure) try {
  std::rethrow_exception(failure);
} catch (const std::exception& error) {
  return error_text(error);
}

/// Another error is one that every rank finds itself.
bool is_lost_connection(const std::exception_ptr& failure) try {
  std::rethrow_exception(failure);
} catch (const c10::DistError&) {
  return true;
} catch (const std::exception&) {
  return false;
}

} // namespace

void Call::announce() {
  announcement_ = std::make_shared<gloo::Exchange>(links_->all, subject_.text);
  announcement_->start(subject_.signature, gloo::ExchangePlan(links_->all->size()));
}

void Call::run(const std::function<void(Call&)>& steps) {
  try {
    steps(*this);
  } catch (const StepFailed&) {
  } catch (const std::exception&) {
    end_with(std::current_exception());
  }
  for (auto& exchange : started_) links_->column->keep_until_closed(std::move(exchange)); // gloo may still write to their buffers
  started_.clear();
  if (!announcement_->is_completed()) links_->all->keep_until_closed(announcement_);
  subject_.tensors.clear();
  const std::lock_guard lock(mutex_);
  is_completed_ = true;
  ended_.notify_all();
}

void Call::wait() {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return is_completed_; });
  const auto explain = explain_;
  lock.unlock();
  if (explain) explain();
}

bool Call::is_completed() const {
  const std::lock_guard lock(mutex_);
  return is_completed_;
}

// Why a step could not be started. That ranks have called something else may be the cause, and says more.
void Call::end_with(const std::exception_ptr& failure) try {
  agree();
  note_failure(failure, [failure] { std::rethrow_exception(failure); });
} catch (const StepFailed&) { // which is noted
}

void Call::note_failure(const std::exception_ptr& failure, std::function<void()> explain) {
  links_->disconnect(text_of(failure));
  const std::lock_guard lock(mutex_);
  explain_ = std::move(explain);
}

std::shared_ptr<gloo::Exchange> Call::across(gloo::ExchangePlan plan) {
  const bool has_second_round = plan.second_round != nullptr;
  plan.finish = [tensors = subject_.tensors, finish = std::move(plan.finish)] { // the exchange keeps them alive
    if (finish) finish();
  };
  auto exchange = std::make_shared<gloo::Exchange>(links_->column, subject_.text);
  exchange->start(subject_.signature, std::move(plan));
  started_.push_back(exchange);
  if (has_second_round) links_->column->complete_in_background(exchange); // must not wait for this rank's other steps
  return exchange;
}

void Call::complete(const std::shared_ptr<gloo::Exchange>& exchange) {
  exchange->complete();
  std::erase(started_, exchange);
  if (!exchange->has_failed()) return;
  note_failure(exchange->failure(), [exchange] { exchange->wait(); });
  throw StepFailed();
}

// A mismatch is found by all ranks in what they were sent, and a connection that is closed could yet keep it from one of them.
void Call::agree() {
  if (has_agreed_) return;
  announcement_->complete();
  has_agreed_ = !announcement_->has_failed();
  if (has_agreed_) return;
  const auto failure = announcement_->failure();
  if (is_lost_connection(failure)) {
    note_failure(failure, [exchange = announcement_] { exchange->wait(); });
  } else {
    const std::lock_guard lock(mutex_);
    explain_ = [exchange = announcement_] { exchange->wait(); };
  }
  throw StepFailed();
}

void Call::within(shared_memory::Motion motion) {
  if (links_->arena) motion.location = links_->arena->find(motion.input.data).value_or(shared_memory::kNowhere);
  shared_memory::Request request;
  request.kind = subject_.kind;
  request.label = subject_.label;
  request.signature = subject_.signature;
  request.motion = std::move(motion);
  complete_operation(links_->inside->start({}, std::move(request)));
}

void Call::complete_operation(const std::shared_ptr<shared_memory::Operation>& operation) {
  links_->inside->complete(*operation);
  if (!operation->failure) return;
  if (!operation->unexplained || !operation->unexplained->timed_out) agree(); // a rank that called something else has left, too
  if (const auto& absence = operation->unexplained) {                         // before the connections close
    const auto reason = absence->timed_out ? MissingRank::Reason::kTimedOut : MissingRank::Reason::kEnded;
    links_->watch->announce({absence->ranks[0], reason});
  }
  note_failure(operation->failure, [engine = links_->inside, operation] { engine->wait(*operation); });
  throw StepFailed();
}

} // namespace tessera::internal::hierarchical
