#pragma once

// Of rank_program: what its scenarios share, and those that have a file of their own.

#include <tessera/collectives/process_context.h>

#include <cstdint>
#include <exception>
#include <numeric>
#include <string>
#include <vector>

namespace tessera::testing {

inline std::vector<int64_t> ranks_up_to(int count) {
  std::vector<int64_t> ranks(count);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

struct World {
  World() : context(process_context()) { group = context.communicator(ranks_up_to(context.world_size()), at::kCPU); }
  int rank() const { return context.rank(); }
  int last() const { return context.world_size() - 1; }

  ProcessContext& context;
  CommunicatorPtr group;
};

/// One all-reduce, after which each rank says that it is done.
void sums();
/// Without its backtrace.
std::string message_of(const std::exception& error);

/// The last rank lets the others wait until they have written, on a signal to the program that started them, that they do. Then
/// it comes.
void is_traced_in_a_hang();
/// The last rank does not come, and ends when the others have failed.
void last_rank_sees_the_others_fail();
void forked_child_is_signalled();
void forked_child_uses_the_group();
/// A child of a fork after `destroy_process_group` drops what is left of the group.
void forked_child_drops_a_destroyed_group();
/// Each rank by hand, so that rank 0 hosts the store. It is the last to leave a job, and something of each job lives on.
void joins_job_after_job();
/// Through a store of the program, on which a thread of it waits all the time, with the ranks in reverse order.
void joins_with_a_store_of_its_own();
/// Before it joins the others' job.
void join_a_job_alone();
/// After it has met the others: says why, and can join them then.
void fail_to_join();
/// Whatever its ranks do with SIGPIPE.
void programs_end_at_a_broken_pipe();
void says_how_many_are_here();
/// Before it joins itself, rank 1 signals the program that started them, when rank 0 is about to join.
void signal_while_others_join();
/// Rank 0 has told the others that it waits for rank 1 by then.
void rank_0_polls_what_comes_late();
/// Rank 0 waits for rank 1, and that one for the last from a later time on.
void rank_1_waits_later_in_a_collective();
void rank_1_waits_later_for_a_group();
void rank_1_waits_later_for_the_end_of_a_meeting();
void rank_1_is_killed_while_it_waits();
/// Each rank makes groups and adds, while others than ranks connect to the job's store and to what the rank listens at.
void strangers_on_every_port();
/// A rank that is drawn is killed, is stopped, throws, hangs or is out-of-step, amid random calls. The others print whether their
/// error names it, and how long after.
void random_failure(const std::string& how, uint32_t seed);

/// What ranks do with a SIGTERM that comes to the program that started them; with RANK_PROGRAM_SIGNALS_ALL to them as well.
void ends_by_signal(const std::string& how);
/// The programs' own handler says that it was called. Returns the status of `launch`.
int launch_with_a_handler(int ranks);
int launch_where_it_is_ignored(int ranks);

} // namespace tessera::testing
