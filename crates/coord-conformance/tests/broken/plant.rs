//! The faults that are planted, and the trial that has to see each.

/// One way in which a backend is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Plant {
    /// In no way: this one passes.
    Nothing,
    /// Whoever asks is granted the lease.
    GrantsTwice,
    /// It looks whether the lease is free, and grants it a moment later.
    LooksBeforeItGrants,
    /// Every grant has the same term.
    TermRepeats,
    /// The term is counted in the lease's record, which is gone when that is deleted.
    TermInTheRecord,
    /// The TTL of all grants but the first is lost.
    SecondGrantNeverEnds,
    /// A grant lasts half of its TTL.
    EndsEarly,
    /// A release deletes whatever is there.
    ReleaseEvictsSuccessor,
    /// A renewal of what is gone acquires it again.
    LateRenewResurrects,
    /// A renewal only writes, whoever holds the lease by then.
    LateRenewSteals,
    /// A retried acquire is a new grant.
    RetryGetsNewTerm,
    /// A holder is known by its node alone.
    HolderByNameOnly,
    /// Reclaiming takes anybody's grant.
    ReclaimTakesAll,
    /// The TTL is said to be what was asked for.
    HidesTheGrantedTtl,
    /// The list ends after its first page.
    ListEndsEarly,
    /// Long names are cut.
    CutsNames,
    /// A failed look-up says that nobody holds the lease.
    FailureReadsAsVacant,
    /// A lease's watch begins with the first change.
    NoFirstSnapshot,
    /// A lease's watch does not show that a grant ran out.
    LeaseEndsWithoutEvent,
    /// A lease's watch does not show another grant of the same node.
    WatchKnowsNodesOnly,
    /// Terms are said to survive a loss that they do not survive.
    TermsLost,
    /// A renewal sets the TTL of the caller's grant, and tells that of the record.
    RenewTellsAnotherTtl,

    /// A heartbeat registers what is gone.
    HeartbeatRecreates,
    /// A heartbeat of any incarnation renews.
    HeartbeatByNameOnly,
    /// A registration replaces another without asking.
    ReplacesUnasked,
    /// Deregistering removes whoever has the id.
    DeregistersSuccessor,
    /// An eviction removes the record whatever was seen.
    EvictIgnoresRevision,
    /// An eviction removes any incarnation.
    EvictIgnoresIncarnation,
    /// The watch of nodes forgets who left.
    WatchForgetsDeparture,
    /// The watch of nodes does not show who ran out.
    NodeEndsWithoutEvent,
    /// A watch that was cut goes on with what comes next.
    CutWatchGoesOn,
    /// A failed look-up says that there are no nodes.
    FailureReadsAsEmpty,
    /// A watch that can't be opened begins with no nodes.
    FailureBeginsEmpty,
    /// Of several departures that are seen in one look, the watch of nodes tells the first.
    OneDepartureALook,
    /// The watch of nodes tells no departure where somebody joins in the same look.
    JoinHidesDepartures,
    /// The watch of nodes knows snapshots only.
    SnapshotsOnly,
    /// A record that somebody deleted is told as a farewell.
    DeletionReadsAsFarewell,
    /// A record that somebody deleted is told as one that ran out by the store's clock.
    DeletionReadsAsJudged,
    /// A registration that is repeated extends nothing.
    RepeatExtendsNothing,
    /// A heartbeat writes whatever record it is given.
    HeartbeatWritesAnything,

    /// A publish is not compared with the fence.
    PublishIgnoresFence,
    /// A fence is its term alone.
    EqualTermPublishes,
    /// A claim reads the map, and takes the table a moment later.
    ClaimReadsFirst,
    /// Two claims of an equal term both win when they race.
    ClaimNotAtomic,
    /// A claim counts as a version.
    ClaimRaisesVersion,
    /// A claim takes the table of another header.
    ClaimIgnoresHeader,
    /// A claim of another lease takes the table.
    ClaimIgnoresLease,
    /// A publish replaces whatever version is there.
    PublishOverwrites,
    /// A repeated publish is a conflict.
    PublishRetryConflicts,
    /// A publish creates the table.
    PublishCreates,
    /// A table that was made again keeps its uid.
    UidSurvives,
    /// A table's watch shows an older map after a newer one.
    WatchGoesBack,

    /// A second answer replaces the first.
    AnswersTwice,
    /// Anybody may answer.
    AnswerIgnoresFence,
    /// Requests are kept for an hour.
    RequestsStay,
    /// A request that is repeated begins its time limit anew.
    RepeatProlongs,
    /// Whoever has a greater term than the leader may answer.
    HigherTermAnswers,

    /// All clusters share one store.
    ClustersLeak,
    /// A close closes nothing.
    CloseDoesNothing,
}

/// All of them, with the trial that is meant to catch each.
pub(crate) const PLANTS: &[(Plant, &str)] = &[
    (Plant::GrantsTwice, "lease::a_second_attempt_is_held"),
    (Plant::LooksBeforeItGrants, "lease::one_of_many_attempts_wins"),
    (Plant::TermRepeats, "lease::terms_rise_after_release"),
    (Plant::TermInTheRecord, "lease::terms_rise_after_deletion"),
    (Plant::SecondGrantNeverEnds, "lease::every_later_grant_ends_too"),
    (Plant::EndsEarly, "lease::a_grant_ends_at_its_ttl"),
    (Plant::ReleaseEvictsSuccessor, "lease::a_late_release_leaves_the_successor"),
    (Plant::LateRenewResurrects, "lease::a_renewal_after_expiry_is_lost"),
    (Plant::LateRenewSteals, "lease::a_late_renewal_loses_to_the_successor"),
    (Plant::RetryGetsNewTerm, "lease::the_same_attempt_gets_the_same_grant"),
    (Plant::HolderByNameOnly, "lease::a_restarted_node_waits_its_former_grant_out"),
    (Plant::ReclaimTakesAll, "lease::reclaim_leaves_other_nodes_alone"),
    (Plant::HidesTheGrantedTtl, "lease::the_granted_ttl_is_told"),
    (Plant::ListEndsEarly, "lease::the_list_shows_what_is_held"),
    (Plant::CutsNames, "lease::names_never_collide"),
    (Plant::FailureReadsAsVacant, "lease::a_failed_lookup_is_not_a_vacancy"),
    (Plant::NoFirstSnapshot, "lease::a_watch_begins_with_a_snapshot"),
    (Plant::LeaseEndsWithoutEvent, "lease::a_watch_shows_expiry"),
    (Plant::WatchKnowsNodesOnly, "lease::a_watch_shows_a_reclaim"),
    (Plant::TermsLost, "lease::terms_rise_over_lost_data"),
    (Plant::RenewTellsAnotherTtl, "lease::a_renewal_tells_the_ttl_that_counts"),
    (Plant::HeartbeatRecreates, "discovery::a_heartbeat_after_expiry_is_gone"),
    (Plant::HeartbeatByNameOnly, "discovery::a_replaced_incarnation_is_superseded"),
    (Plant::ReplacesUnasked, "discovery::a_duplicate_is_told_the_address"),
    (Plant::DeregistersSuccessor, "discovery::deregistering_ends_only_ones_own"),
    (Plant::EvictIgnoresRevision, "discovery::an_eviction_with_an_old_revision_is_refused"),
    (Plant::EvictIgnoresIncarnation, "discovery::an_eviction_of_another_incarnation_is_refused"),
    (Plant::WatchForgetsDeparture, "discovery::a_watch_shows_joins_updates_and_departures"),
    (Plant::NodeEndsWithoutEvent, "discovery::a_watch_shows_expiry"),
    (Plant::CutWatchGoesOn, "discovery::a_cut_watch_misses_nothing"),
    (Plant::FailureReadsAsEmpty, "discovery::a_failed_lookup_is_not_an_empty_cluster"),
    (Plant::FailureReadsAsEmpty, "backend::its_own_errors_say_that_the_store_is_away"),
    (Plant::FailureBeginsEmpty, "backend::its_own_errors_say_that_the_store_is_away"),
    (Plant::OneDepartureALook, "discovery::a_watch_shows_departures_of_one_moment"),
    (Plant::JoinHidesDepartures, "discovery::a_watch_shows_departures_of_one_moment"),
    (Plant::SnapshotsOnly, "discovery::a_watch_tells_a_farewell"),
    (Plant::DeletionReadsAsFarewell, "discovery::a_deleted_record_is_no_farewell"),
    (Plant::DeletionReadsAsJudged, "discovery::a_deleted_record_is_no_farewell"),
    (Plant::RepeatExtendsNothing, "discovery::the_same_incarnation_registers_again"),
    (Plant::HeartbeatWritesAnything, "discovery::a_heartbeat_with_anothers_record_is_refused"),
    (Plant::PublishIgnoresFence, "placement::a_publish_by_a_lower_fence_is_fenced"),
    (
        Plant::EqualTermPublishes,
        "placement::a_publish_by_an_equal_term_of_another_attempt_is_fenced",
    ),
    (Plant::ClaimReadsFirst, "placement::what_a_claim_returns_stays"),
    (Plant::ClaimNotAtomic, "placement::racing_claims_of_an_equal_term_have_one_winner"),
    (Plant::ClaimRaisesVersion, "placement::a_claim_raises_the_fence_not_the_version"),
    (Plant::ClaimIgnoresHeader, "placement::a_claim_with_another_header_is_a_mismatch"),
    (Plant::ClaimIgnoresLease, "placement::another_lease_is_refused"),
    (Plant::PublishOverwrites, "placement::one_of_many_publishes_wins"),
    (Plant::PublishRetryConflicts, "placement::a_repeated_publish_is_the_same_success"),
    (Plant::PublishCreates, "placement::publishing_to_an_absent_table_is_fenced"),
    (Plant::UidSurvives, "placement::a_table_made_again_is_another"),
    (Plant::WatchGoesBack, "placement::a_late_reader_gets_the_newest_map"),
    (Plant::AnswersTwice, "requests::a_request_is_answered_once"),
    (Plant::AnswerIgnoresFence, "requests::an_answer_is_fenced"),
    (Plant::RequestsStay, "requests::a_request_is_forgotten_at_its_limit"),
    (Plant::RepeatProlongs, "requests::a_repeated_request_keeps_its_limit"),
    (Plant::HigherTermAnswers, "requests::an_answer_is_fenced"),
    (Plant::ClustersLeak, "backend::clusters_are_apart"),
    (Plant::CloseDoesNothing, "backend::a_closed_handle_says_so"),
];
