-- What a running attempt saved of its work, for the next claim.

ALTER TABLE jobs ADD COLUMN checkpoint BLOB;
